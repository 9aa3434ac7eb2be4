"""Whether a graph computes what the module computes."""
