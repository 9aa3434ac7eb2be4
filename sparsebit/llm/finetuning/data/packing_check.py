"""Checks whether a model keeps the samples of a row separate, on the model itself, before training on packed rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.llm.finetuning.data.instructions import Sample
from sparsebit.llm.finetuning.data.sample_packing import Batch, make_batch

_LENGTH = 12


@torch.no_grad()
def check_packing(model: Any, samples: Sequence[Sample], outputs: Callable[[Batch], Tensor]) -> None:
    """Compare the logits of a sample alone with those after two different samples; a difference is an error.

    An architecture that ignores positions which begin again would train each sample with its neighbours in
    view. `outputs`: for a batch, a value at each position, such as logits.
    """
    tokens = [token for sample in samples[:8] for token in sample.tokens]
    if len(tokens) < 3:
        return
    tokens = (tokens * (3 * _LENGTH))[: 3 * _LENGTH]
    first, second, seen = (_all_learned(tokens[n * _LENGTH : (n + 1) * _LENGTH]) for n in range(3))
    other = _all_learned([*reversed(first.tokens[1:]), second.tokens[0]])
    device = next(one.device for one in model.parameters() if not one.is_meta)
    was_training = model.training
    model.eval()
    try:
        alone, behind, elsewhere = (
            _of_last(outputs, row, device) for row in ((seen,), (first, second, seen), (other, second, seen))
        )
    finally:
        model.train(was_training)
    size = alone.abs().max().clamp(min=1e-30)
    allowed = 1e-3 if alone.dtype == torch.float32 else 5e-2
    moved, leaked = float((behind - alone).abs().max() / size), float((behind - elsewhere).abs().max() / size)
    if not (moved <= allowed and leaked <= 1e-4):
        raise ConfigError(
            f"packing: {type(model).__name__} computes other values for a sample that shares its row (they differ by "
            f"{max(moved, leaked):.2g} of the largest), so that samples would see each other; switch packing off "
            "(--no-packing)"
        )


def _all_learned(tokens: Sequence[int]) -> Sample:
    return Sample(tuple(tokens), (True,) * len(tokens))


def _of_last(outputs: Callable[[Batch], Tensor], row: Sequence[Sample], device: torch.device) -> Tensor:
    """The outputs for the last sample of the row."""
    batch = make_batch(row, [list(range(len(row)))], 0).to(device)
    return outputs(batch)[0, -_LENGTH:]
