"""Render tables and plots from results/, without importing scripts or PyTorch."""
