"""Algorithms that improve a calibrated model, one per file; `registration.py` makes them entries of configs."""
