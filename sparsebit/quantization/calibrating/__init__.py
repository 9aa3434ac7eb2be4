"""Runs observers over the data and computes scales and zero points."""
