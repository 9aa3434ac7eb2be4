"""Compares a file with its simulation, with its float twin, or with its own definition."""
