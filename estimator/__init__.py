"""What estimate.py is made of: scripts run on tensors without numbers, and the cost of sending."""
