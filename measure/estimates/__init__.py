"""Predictions compared with published figures."""
