"""Quantizes a model block by block: calibration, rounding, bits per layer, resuming."""
