"""What the scripts of DeepSpeed and Accelerate need besides: optional libraries."""
