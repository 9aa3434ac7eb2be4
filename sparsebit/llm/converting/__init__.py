"""From one file format to another, and the check that the target loads it."""
