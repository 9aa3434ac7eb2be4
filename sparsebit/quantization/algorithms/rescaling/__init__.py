"""Per-channel factors that are moved between layers: equalization and smoothing."""
