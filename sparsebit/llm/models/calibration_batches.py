"""Calibration data as keyword arguments of a model: windows of text, or what a processor makes of images and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from sparsebit.errors import ConfigError

Batch: TypeAlias = Mapping[str, Tensor]
# Windows of tokens `(samples, length)`, which are cut into batches; or batches.
Tokens: TypeAlias = Tensor | tuple[Batch, ...]
IDS = "input_ids"


def as_batches(tokens: Tokens, size: int) -> tuple[Batch, ...]:
    """The batches; `size`: windows of a batch of text."""
    return tuple({IDS: part} for part in tokens.split(size)) if isinstance(tokens, Tensor) else tokens


def num_tokens(tokens: Tokens) -> int:
    return sum(batch[IDS].numel() for batch in as_batches(tokens, 1 << 30))


def to_device(batch: Batch, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The batch on a device; floats, such as pixels, in this type."""
    return {key: one.to(device, dtype if one.is_floating_point() else one.dtype) for key, one in batch.items()}


def checked_batches(given: Sequence[Mapping[str, Tensor]]) -> tuple[Batch, ...]:
    """The caller's batches, which must be outputs of a processor with return_tensors="pt"."""
    batches = tuple(given)
    for number, batch in enumerate(batches):
        is_mapping = hasattr(batch, "items")
        wrong = [key for key, value in batch.items() if not isinstance(value, Tensor)] if is_mapping else [type(batch)]
        ids = None if wrong else batch.get(IDS)
        if wrong or ids is None or ids.ndim != 2 or not ids.numel():
            raise ConfigError(
                f"calibration batch {number}: {wrong or [*batch]}: allowed: mappings of tensors with input_ids "
                '(samples, length), as a processor makes them with return_tensors="pt"'
            )
    if not batches:
        raise ConfigError("calibration: no batches: give at least one")
    return tuple({key: value.cpu() for key, value in batch.items()} for batch in batches)
