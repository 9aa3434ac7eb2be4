"""Quantizable ops: one table, one wrapper."""
