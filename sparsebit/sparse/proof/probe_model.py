"""Copies of a model for experiments, in which zero or constant parameters cannot hide an error."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsebit.errors import CaptureError
from sparsebit.execution.batches import Call, num_samples, rows_of
from sparsebit.graph.values.copying import copy_model
from sparsebit.graph.values.nested import map_nested
from sparsebit.sparse.channels.trace import watch
from sparsebit.sparse.shrinking.surgery import named_tensors

_NUM_SAMPLES = 2  # with one, a dimension of size 1 could hide an error


def probe_of(model: nn.Module, call: Call) -> tuple[nn.Module, Call]:
    """A copy for experiments and its call: in float64 if the model runs in it, so that rounding hides no error."""
    copied = _varied_copy(model)
    run = watch(copy_model(copied), call)
    if run.error is not None:
        raise CaptureError(f"the model does not run on the example inputs: {run.error}") from run.error
    call = _few_samples(copied, call, run.outputs)
    precise, inputs = _double_precision(copied, call)
    again = watch(copy_model(precise), inputs)
    with torch.no_grad():  # outputs may be views that the model has written into
        is_finite = all(bool(torch.isfinite(x).all()) for x in again.outputs if x.is_floating_point())
    return (precise, inputs) if again.error is None and is_finite else (copied, call)


def _few_samples(model: nn.Module, call: Call, outputs: list[Tensor]) -> Call:
    """The call with its first two samples only, if the outputs then have two rows: a proof needs no more samples."""
    count = num_samples(call, outputs)
    if count <= _NUM_SAMPLES:
        return call
    few: Call = rows_of(call, count, 0, _NUM_SAMPLES)
    run = watch(copy_model(model), few)
    expected = [(_NUM_SAMPLES, *x.shape[1:]) if x.dim() and len(x) == count else tuple(x.shape) for x in outputs]
    is_same = run.error is None and [tuple(x.shape) for x in run.outputs] == expected
    return few if is_same else call


def _varied_copy(model: nn.Module) -> nn.Module:
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


def _double_precision(model: nn.Module, call: Call) -> tuple[nn.Module, Call]:
    """Model and call in float64, where errors of rounding do not hide others."""
    args, kwargs = map_nested(Tensor, lambda x: x.double() if x.is_floating_point() else x, call)
    return copy_model(model).double(), (args, kwargs)
