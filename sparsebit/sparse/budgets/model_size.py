"""How large a model is: multiplications of one call, parameters, and their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparsebit.execution.batches import calls, num_samples
from sparsebit.graph.state.modes import evaluating, without_gradients
from sparsebit.graph.tracing.patched_torch import unfused_attention


@dataclass(frozen=True)
class ModelSize:
    """`macs`: multiply-accumulates of convolutions and matrix products in one call, divided by its batch size."""

    macs: float
    parameters: int
    bytes: int

    def to_dict(self) -> dict[str, float]:
        return {"macs": self.macs, "parameters": self.parameters, "bytes": self.bytes}


def model_size(model: nn.Module, example_inputs: Any) -> ModelSize:
    """The size of a model as it is; `example_inputs`: a batch. Tied parameters count once, buffers count as bytes."""
    from torch.utils.flop_counter import FlopCounterMode  # it imports triton, which takes a second

    device = next((p.device for p in model.parameters()), None)
    args, kwargs = next(iter(calls([example_inputs], model, device)))
    # The fused operator for a whole attention layer is not counted, and the counter fails on a view of a parameter that
    # needs a gradient.
    counter = FlopCounterMode(display=False)
    with evaluating(model), without_gradients(model), unfused_attention(), torch.no_grad(), counter:
        outputs = model(*args, **kwargs)
    tensors = [*model.parameters(), *model.buffers()]
    return ModelSize(
        counter.get_total_flops() / 2 / max(1, num_samples((args, kwargs), outputs)),
        sum(parameter.numel() for parameter in model.parameters()),
        sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    )
