"""Weights that a layer is called with instead of its own, by `torch.func.functional_call` or by writes in forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.graph.values.nested import unwrapped
from sparsebit.quantization.ops.layer_call import current_weight
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr


class GivenWeights:
    """Replaces a layer's `compute_layer` during calibration, and observes every weight that is not the layer's own.

    Its own weight is observed once, at the end of the calibration.
    """

    def __init__(self, layer: WeightedQuantOpr) -> None:
        self.layer, self.saw_any = layer, False
        self.note_own()
        layer.weight_quantizer.observer.reset()
        layer.__dict__["compute_layer"] = self.compute_layer

    def note_own(self) -> None:
        """Treat the current parameters as the layer's own, as at the beginning of a forward of the model."""
        self.own = _contents(self.layer.op)

    def remove(self) -> None:
        self.layer.__dict__.pop("compute_layer", None)

    def compute_layer(self, *args: Any, **kwargs: Any) -> Any:
        if _contents(self.layer.op) != self.own:
            self.saw_any = True
            for weight in unwrapped(current_weight(self.layer.op).detach()):
                self.layer.weight_quantizer.update_observer(weight)
        return type(self.layer).compute_layer(self.layer, *args, **kwargs)


class _Content:
    """A tensor and its version, to be compared with another state of a module."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        is_plain = type(tensor) in (Tensor, nn.Parameter) and not is_wrapped and not tensor.is_inference()
        self.state = (tensor.data_ptr(), tensor._version) if is_plain else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Content) and self.tensor is other.tensor and self.state == other.state

    __hash__ = None  # type: ignore[assignment]


def _contents(module: nn.Module) -> list[_Content]:
    return list(map(_Content, module.parameters()))
