"""The kinds of a packed cache of keys and values. Imports nothing, since the command line lists them."""

from __future__ import annotations

from typing import Literal, get_args

CacheKind = Literal["int8", "fp8", "int4"]
CACHE_KINDS: tuple[CacheKind, ...] = get_args(CacheKind)
CALIBRATED: tuple[CacheKind, ...] = ("int8", "fp8")  # their scales are constants from calibration text
LARGEST: dict[CacheKind, float] = {"int8": 127.0, "fp8": 448.0}  # the code of the largest calibrated value
