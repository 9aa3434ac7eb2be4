"""`Absorbed`: marks a module whose part another layer computes."""

from __future__ import annotations


class Absorbed:
    """A module whose part another layer computes; the model's own code may still call it."""
