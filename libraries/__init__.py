"""Adapters for libraries, for the scripts that use them: DeepSpeed, Accelerate, pipelines."""
