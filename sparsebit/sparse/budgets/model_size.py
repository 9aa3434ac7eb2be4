"""How large a model is: multiplications of one call, parameters, and their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparsebit.execution.batches import calls, num_samples


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
    modes = {module: module.training for module in model.modules()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its one operator for a whole layer is not counted
    model.eval().requires_grad_(False)  # the counter fails on a view of a parameter that needs a gradient
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            outputs = model(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, mode in modes.items():
            module.training = mode
        for parameter in trained:
            parameter.requires_grad_(True)
    tensors = [*model.parameters(), *model.buffers()]
    return ModelSize(
        counter.get_total_flops() / 2 / max(1, num_samples((args, kwargs), outputs)),
        sum(parameter.numel() for parameter in model.parameters()),
        sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    )
