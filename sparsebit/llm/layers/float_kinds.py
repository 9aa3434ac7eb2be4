"""The kinds of float numbers that weights are stored in, and their groups; without torch, for the command line."""

from __future__ import annotations

from typing import Literal, get_args

FloatKind = Literal["fp8", "mxfp4", "nvfp4"]
FLOAT_KINDS: tuple[FloatKind, ...] = get_args(FloatKind)
# Columns that share a scale; 0: all of a row.
GROUPS: dict[FloatKind, int] = {"fp8": 0, "mxfp4": 32, "nvfp4": 16}
