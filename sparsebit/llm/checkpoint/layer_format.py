"""`LayerFormat`: the number format of one packed layer, as in the configs of all file formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightKind = Literal["int", "fp8", "mxfp4", "nvfp4"]


@dataclass(frozen=True)
class LayerFormat:
    """The number format of one layer. `group_size`: 0 is one scale per row. `kind`: of the numbers."""

    bits: int
    group_size: int
    symmetric: bool
    kind: WeightKind = "int"
