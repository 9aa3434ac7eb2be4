"""Writes quantized models to folders, loads them, and rebuilds the model."""
