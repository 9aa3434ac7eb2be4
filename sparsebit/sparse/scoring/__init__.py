"""Criteria, the evidence they read, and masks of elements."""
