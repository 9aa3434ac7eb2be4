"""From scores and ratios to masks: elements, units, residual blocks."""
