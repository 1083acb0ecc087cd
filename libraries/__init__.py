"""Adapters for libraries: DeepSpeed, Accelerate, PEFT, and the files of the Hugging Face Hub."""
