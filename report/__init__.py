"""Tables and plots out of results/. Reads files; imports no script, and no PyTorch."""
