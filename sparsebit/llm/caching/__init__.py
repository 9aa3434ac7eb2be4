"""The cache of keys and values in 8 or 4 bits."""
