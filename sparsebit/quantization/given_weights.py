"""Weights in the place of a layer's own, which `torch.func.functional_call` gives it for as long as a call takes."""

from __future__ import annotations

import operator
from typing import Any

from sparsebit.graph.nested import unwrapped
from sparsebit.quantization.ops.layer_call import current_weight
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr


class GivenWeights:
    """Stands in the place of a layer's `compute_layer` while it is calibrated, and observes weights that are given.

    Those that the layer owns are observed at the end, once.
    """

    def __init__(self, layer: WeightedQuantOpr) -> None:
        self.layer, self.own = layer, tuple(layer.op.parameters())
        self.saw_any = False
        layer.weight_quantizer.observer.reset()
        layer.__dict__["compute_layer"] = self.compute_layer

    def remove(self) -> None:
        self.layer.__dict__.pop("compute_layer", None)

    def compute_layer(self, *args: Any, **kwargs: Any) -> Any:
        given = tuple(self.layer.op.parameters())
        if len(given) != len(self.own) or not all(map(operator.is_, given, self.own)):
            self.saw_any = True
            for weight in unwrapped(current_weight(self.layer.op).detach()):
                self.layer.weight_quantizer.update_observer(weight)
        return type(self.layer).compute_layer(self.layer, *args, **kwargs)
