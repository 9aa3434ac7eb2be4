"""`Absorbed`: marks a module that was folded into another layer."""

from __future__ import annotations


class Absorbed:
    """A module that does nothing, because another layer computes its part; the model's own code may still call it."""
