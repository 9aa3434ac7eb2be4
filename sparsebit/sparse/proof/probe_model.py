"""Copies of a model for experiments, in which zero or constant parameters cannot hide an error."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsebit.execution.batches import Call
from sparsebit.graph.values.copying import copy_model
from sparsebit.graph.values.nested import map_nested
from sparsebit.sparse.shrinking.surgery import named_tensors


def probe_copy(model: nn.Module) -> nn.Module:
    """A copy in which nothing hides an error: constant parameters (fresh norms, layer scales) get random values."""
    copied = copy_model(model).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in named_tensors(copied).values():
            flat = tensor.flatten()
            if tensor.is_floating_point() and len(flat) and bool((flat == flat[0]).all()):
                values = torch.rand(tensor.shape, generator=generator).to(tensor)
                tensor.copy_((values - 0.5) * 0.2 if float(flat[0]) == 0 else values + 0.5)
    return copied


def double_precision(model: nn.Module, call: Call) -> tuple[nn.Module, Call]:
    """Model and call in float64, where errors of rounding do not hide others."""
    args, kwargs = map_nested(Tensor, lambda x: x.double() if x.is_floating_point() else x, call)
    return copy_model(model).double(), (args, kwargs)
