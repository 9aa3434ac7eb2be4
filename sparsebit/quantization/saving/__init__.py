"""Folders of quantized models: writing, loading, and rebuilding the model."""
