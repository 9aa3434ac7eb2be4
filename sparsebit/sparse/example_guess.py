"""Guesses a batch for a model without one: the first layer shows its input, and the model must run on it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sparsebit.errors import CaptureError
from sparsebit.graph.values.copying import copy_model


def guessed_example(model: nn.Module) -> Tensor:
    """A batch on which the model runs."""
    trial = copy_model(model).eval()
    parameter = next(model.parameters(), None)
    device = "cpu" if parameter is None else parameter.device
    for batch in _candidates(model):
        try:
            with torch.no_grad():
                trial(batch.to(device))
        except Exception:
            continue
        return batch.to(device)
    raise CaptureError(
        f"{type(model).__name__}: channels are found by running the model, and no batch could be guessed; "
        "give example_inputs=batch"
    )


def _candidates(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield torch.randint(0, module.num_embeddings, (2, 8))
        elif isinstance(module, nn.Linear):
            yield torch.randn(2, module.in_features)
            yield torch.randn(2, 5, module.in_features)
        elif isinstance(module, nn.Conv1d):
            yield from (torch.randn(2, module.in_channels, size) for size in (64, 2000))
        elif isinstance(module, nn.Conv2d):
            yield from (torch.randn(2, module.in_channels, size, size) for size in (32, 64, 224, 28))
        elif isinstance(module, nn.Conv3d):
            yield torch.randn(1, module.in_channels, 8, 32, 32)
        else:
            continue
        return
