"""The parts of estimate.py: run scripts on fake tensors, and estimate communication time."""
