"""Values that a model takes and returns: nested, copied, compared."""
