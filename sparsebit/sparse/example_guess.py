"""Guesses a batch for a model without one: the first layer shows its input, and the model must run on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CaptureError
from sparsebit.graph.values.copying import copy_model


def guessed_example(model: nn.Module) -> Tensor:
    """A batch on which the model runs."""
    trial = copy_model(model).eval()
    device = next((parameter.device for parameter in model.parameters()), "cpu")
    for batch in _candidates(model):
        with contextlib.suppress(Exception), torch.no_grad():
            trial(batch.to(device))
            return batch.to(device)
    name = type(model).__name__
    raise CaptureError(f"{name}: no batch that finds channels could be guessed; give example_inputs=batch")


# By the class of the first layer: shapes with its number of input channels in the place of -1.
_SHAPES: dict[type[nn.Module], list[tuple[int, ...]]] = {
    nn.Linear: [(2, -1), (2, 5, -1)],
    nn.Conv1d: [(2, -1, size) for size in (64, 2000)],
    nn.Conv2d: [(2, -1, size, size) for size in (32, 64, 224, 28)],
    nn.Conv3d: [(1, -1, 8, 32, 32)],
}


def _candidates(model: nn.Module) -> Iterator[Tensor]:
    first: Any = next((part for part in model.modules() if isinstance(part, (nn.Embedding, *_SHAPES))), None)
    if isinstance(first, nn.Embedding):
        yield torch.randint(0, first.num_embeddings, (2, 8))
    for shape in [shape for kind, shapes in _SHAPES.items() if isinstance(first, kind) for shape in shapes]:
        width = first.in_features if isinstance(first, nn.Linear) else first.in_channels
        yield torch.randn([width if size < 0 else size for size in shape])
