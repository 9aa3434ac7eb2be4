"""Folders of quantized models, and the record of a run."""
