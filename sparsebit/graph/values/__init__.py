"""Values that a model takes and gives: nested, copied, compared."""
