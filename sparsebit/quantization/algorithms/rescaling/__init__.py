"""Factors moved between layers: equalization and smoothing."""
