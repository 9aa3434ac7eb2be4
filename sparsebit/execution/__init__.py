"""Data through graphs in bounded memory."""
