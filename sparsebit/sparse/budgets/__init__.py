"""Ratios under a budget of MACs, bytes or measured latency."""
