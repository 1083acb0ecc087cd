"""What estimate.py is made of: scripts run on fake tensors, and communication time."""
