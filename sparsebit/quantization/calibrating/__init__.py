"""Observers' runs over the data."""
