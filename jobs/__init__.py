"""What is trained: data and models."""
