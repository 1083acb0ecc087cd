"""The training tasks: data and models."""
