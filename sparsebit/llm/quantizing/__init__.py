"""The run: blocks in turn, their ranges and rounding, bits per layer, resume."""
