"""Runs one batch through the float model, to check that model and data fit, and for later comparisons."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.cli.inputs.data import Data
from sparsebit.cli.inputs.loading import LoadingError, users_code
from sparsebit.deploy.comparing.parity import decibels
from sparsebit.execution.batches import Call, as_call, input_rows, to_device
from sparsebit.execution.sample_rows import SampleRows, find_sample_rows
from sparsebit.graph.values.input_hints import input_hint, range_hint

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FirstBatch:
    """The first batch as a call, the float model's outputs, and where the samples are in it."""

    call: Call
    outputs: list[Tensor]
    samples: SampleRows

    @property
    def num_samples(self) -> int:
        return self.samples.count

    def again(self, model: nn.Module, device: str) -> FirstBatch:
        """The same call with the outputs of another model."""
        args, kwargs = to_device(self.call, device)
        with torch.no_grad():
            return replace(self, outputs=[output.cpu() for output in _floats(model(*args, **kwargs))])

    def sqnr_db(self, quantized: nn.Module, device: str) -> float:
        """Signal to quantization noise over all float outputs, in decibels."""
        answers = self.again(quantized, device).outputs
        signal = sum(float(x.double().square().sum()) for x in self.outputs)
        noise = sum(float((x - y).double().square().sum()) for x, y in zip(self.outputs, answers, strict=True))
        return decibels(signal, noise)


def run_first_batch(model: nn.Module, data: Data) -> FirstBatch:
    """Run the first batch before any long work; if model and data do not fit, the error shows their shapes."""
    batch = next(iter(data), None)
    args, kwargs = call = as_call(batch, model) if batch is not None else ((), {})
    if batch is None or input_rows(call) == {0}:
        raise LoadingError(f"no data: {data.description} gave no batch, or a first one without samples")
    what = f"the float model cannot run this data ({_shapes(call)})"
    with users_code(what, hint=input_hint(call)), torch.no_grad():
        outputs = model(*args, **kwargs)
    if hint := range_hint(call):
        log.warning("%s: %s", data.description, hint)
    return FirstBatch(call, _floats(outputs), find_sample_rows(call, model, outputs))


def _floats(outputs: Any) -> list[Tensor]:
    # transformers' outputs are mappings that pytree may not know
    plain = dict(outputs) if hasattr(outputs, "keys") and hasattr(outputs, "__getitem__") else outputs
    return [leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _shapes(call: Call) -> str:
    args, kwargs = call
    named = [("", arg) for arg in args] + [(f"{name}=", arg) for name, arg in kwargs.items()]
    return ", ".join(
        f"{name}{tuple(arg.shape)} {str(arg.dtype).removeprefix('torch.')}"
        if isinstance(arg, Tensor)
        else f"{name}{type(arg).__name__}"
        for name, arg in named
    )
