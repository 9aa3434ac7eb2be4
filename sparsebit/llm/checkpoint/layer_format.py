"""`LayerFormat`: the number format of one packed layer, as in the configs of all file formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from sparsebit.errors import CheckpointError
from sparsebit.llm.layers.input_kinds import InputFormat

WeightKind = Literal["int", "fp8", "mxfp4", "nvfp4"]


@dataclass(frozen=True)
class LayerFormat:
    """The number format of one layer. `group_size`: 0 is one scale per row. `kind`: of the numbers.

    `inputs`: how inputs are rounded, if not as usual for the kind (fp8: a scale for each token; others: not at all).
    `is_dense`: int codes are in a tensor of int8, one in a byte.
    """

    bits: int
    group_size: int
    symmetric: bool
    kind: WeightKind = "int"
    inputs: InputFormat | None = None
    is_dense: bool = False


def layer_parts(tensors: Mapping[str, Tensor], name: str, suffixes: Sequence[str]) -> list[Tensor]:
    """The tensors of the layer `name` in a file; one that the file lacks is an error."""
    missing = [suffix for suffix in suffixes if f"{name}.{suffix}" not in tensors]
    if missing:
        raise CheckpointError(f"layer {name} has no {', '.join(missing)}: the files and their config do not fit")
    return [tensors[f"{name}.{suffix}"] for suffix in suffixes]
