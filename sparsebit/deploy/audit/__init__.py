"""Which layers run in integers, which do not and why, and their cost."""
