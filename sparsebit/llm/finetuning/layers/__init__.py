"""Packed layers with adapters, and blocks recorded as CUDA graphs."""
