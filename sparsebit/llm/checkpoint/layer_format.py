"""`LayerFormat`: the number format of one packed layer, as the configs of all file formats say it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerFormat:
    """The number format of one layer. `group_size`: 0 is one scale per row."""

    bits: int
    group_size: int
    symmetric: bool
