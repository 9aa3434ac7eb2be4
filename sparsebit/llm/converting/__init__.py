"""Converts packed models to other file formats, and checks that the target loads them."""
