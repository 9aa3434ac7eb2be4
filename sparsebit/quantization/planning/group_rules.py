"""Raises for weight groups that a backend does not support. Called while planning, when shapes are known."""

from __future__ import annotations

from collections.abc import Sequence

from sparsebit.backends import BACKENDS
from sparsebit.config.schema import WeightConfig
from sparsebit.errors import BackendError
from sparsebit.numerics.spec import PerGroup, TensorSpec
from sparsebit.quantization.planning.sites import spec_of


def check_groups(layer: str, config: WeightConfig, shape: Sequence[int], channel_axis: int, backend: str) -> None:
    """As `check_group_format`, for the format in a config."""
    if not config.QUANTIZER.DISABLE:
        check_group_format(layer, spec_of(config, channel_axis), shape, backend)


def check_group_format(layer: str, spec: TensorSpec, shape: Sequence[int], backend: str) -> None:
    """Raise for groups of bits that `backend` does not support, and for a last group shorter than the others."""
    runs, fault = BACKENDS[backend], ""
    if not isinstance(spec.granularity, PerGroup):
        return
    length, size = shape[spec.granularity.axis], spec.granularity.size
    if len(shape) == 2 and length <= size:  # a single group is written as one scale per channel
        return
    if runs.group_bits is not None and spec.bits not in runs.group_bits:
        allowed = " or ".join(map(str, sorted(runs.group_bits)))
        fault = f"BIT={spec.bits} at {layer}: {backend} reads groups of {allowed}-bit weights only; set {allowed}"
    elif runs.whole_groups and length % size:
        divisors = [size for size in range(length // 2, 1, -1) if length % size == 0]
        fault = (
            f"GROUP_SIZE={size} at {layer}: {length} inputs do not make whole groups, and {backend} reads whole groups "
            f"only; set one that divides {length} ({', '.join(map(str, divisors[:3] or [length]))})"
        )
    if fault:
        escape = "a per-channel QSCHEME (W.SPECIFIC sets it for this layer alone), or BACKEND: virtual"
        raise BackendError(f"W.QUANTIZER.{fault}, {escape}")
