"""Algorithms that improve a calibrated model, one per file."""
