"""Raises for weight groups that a backend does not support, when the model is planned and shapes are known."""

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
    runs = BACKENDS[backend]
    if not isinstance(spec.granularity, PerGroup):
        return
    length, size = shape[spec.granularity.axis], spec.granularity.size
    if len(shape) == 2 and length <= size:  # one group: a scale per channel, and written so
        return
    escape = "a per-channel QSCHEME (W.SPECIFIC sets it for this layer alone), or BACKEND: virtual"
    if runs.group_bits is not None and spec.bits not in runs.group_bits:
        allowed = " or ".join(map(str, sorted(runs.group_bits)))
        raise BackendError(
            f"W.QUANTIZER.BIT={spec.bits} at {layer}: {backend} reads groups of {allowed}-bit weights only; set "
            f"{allowed}, {escape}"
        )
    if runs.whole_groups and length % size:
        raise BackendError(
            f"W.QUANTIZER.GROUP_SIZE={size} at {layer}: {length} inputs do not make whole groups, and {backend} "
            f"reads whole groups only; set one that divides {length} ({_divisors(length)}), {escape}"
        )


def _divisors(number: int) -> str:
    """The largest proper divisors: `384, 256, 192`."""
    found = [size for size in range(number // 2, 1, -1) if number % size == 0]
    return ", ".join(map(str, found[:3] or [number]))
