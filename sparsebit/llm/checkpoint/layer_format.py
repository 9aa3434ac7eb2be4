"""`LayerFormat`: the number format of one packed layer, as in the configs of all file formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from sparsebit.errors import CheckpointError

WeightKind = Literal["int", "fp8", "mxfp4", "nvfp4"]


@dataclass(frozen=True)
class LayerFormat:
    """The number format of one layer. `group_size`: 0 is one scale per row. `kind`: of the numbers."""

    bits: int
    group_size: int
    symmetric: bool
    kind: WeightKind = "int"


def layer_parts(tensors: Mapping[str, Tensor], name: str, suffixes: Sequence[str]) -> list[Tensor]:
    """The tensors of the layer `name` in a file; one that the file lacks is an error."""
    missing = [suffix for suffix in suffixes if f"{name}.{suffix}" not in tensors]
    if missing:
        raise CheckpointError(f"layer {name} has no {', '.join(missing)}: the files and their config do not fit")
    return [tensors[f"{name}.{suffix}"] for suffix in suffixes]
