"""The parts of model_inference.py: load a trained model, run it, export it."""
