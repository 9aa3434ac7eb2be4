"""In training on a GPU, GELU and SiLU in front of a layer's quantizer are left to the layer.

Its kernels compute them on the way, forward and backward: a pass over memory less each, and what the function gave is
not kept. In eval mode, in an export, on a CPU and wherever somebody watches, the function is called. In a compiled
graph the two are joined (`numerics.joining`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.graph.capture import Captured
from sparsebit.graph.patterns import module_of, only_reader
from sparsebit.numerics import operator
from sparsebit.numerics.activations import name_of
from sparsebit.quantization.ops.cheap import CheapFunction
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.quantizers.recognition import is_hooked, is_operator_alone, is_replica, is_watched
from sparsebit.quantization.saved_activations import note_cheap


class DeferredActivation(nn.Module):
    """`module` with its settings, whose only reader is `reader`; dropouts may stand between the two."""

    def __init__(
        self,
        module: nn.Module,
        settings: dict[str, Any],
        name: str,
        reader: WeightedQuantOpr,
        dropouts: list[nn.Dropout],
    ) -> None:
        super().__init__()
        self.settings, self.name = settings, name
        if isinstance(module, CheapFunction):
            self.function = module
        # In a tuple: their homes are elsewhere.
        self._parts = (module, reader, reader.input_quantizer, tuple(dropouts))

    def forward(self, input: Tensor) -> Tensor:
        module, _, quantizer, _ = self._parts
        if self.training and not torch.compiler.is_compiling() and self._is_taken_over(input):
            quantizer.hand_over(self.name, input)
            return input
        output: Tensor = module(input, **self.settings)
        return output

    def _is_taken_over(self, x: Tensor) -> bool:
        module, reader, quantizer, dropouts = self._parts
        if not (torch.is_grad_enabled() and x.requires_grad and operator.fuses(x) and is_operator_alone(quantizer)):
            return False
        if is_watched(reader):
            return False
        if is_hooked(module, besides=note_cheap) or "forward" in module.__dict__ or is_replica(self):
            return False
        return all(dropout.p == 0.0 and not is_hooked(dropout) for dropout in dropouts)

    def extra_repr(self) -> str:
        return self.name


def defer_activations(captured: Captured) -> None:
    for region in captured.regions.values():
        root = region.graph_module
        for node in list(root.graph.nodes):
            name = _name(node, root)
            reader, dropouts = _reader_behind_dropouts(node, root) if name is not None else (None, [])
            if name is None or type(reader) is not WeightedQuantOpr:
                continue
            module = module_of(node, root) or CheapFunction(node.target)
            settings = {key: value for key, value in node.kwargs.items() if key != "input"}
            place = f"{node.name}_deferred"
            deferred = DeferredActivation(module, settings, name, reader, dropouts)
            root.add_submodule(place, deferred.train(root.training))
            node.op, node.target, node.args, node.kwargs = "call_module", place, (node.all_input_nodes[0],), {}
        root.recompile()


def _name(node: fx.Node, root: fx.GraphModule) -> str | None:
    if len(node.all_input_nodes) != 1:
        return None
    if node.op == "call_function":
        return name_of(node.target, node.args[1:], node.kwargs)
    module = module_of(node, root)
    if isinstance(module, CheapFunction):
        return name_of(module.function, node.args[1:], node.kwargs)
    if type(module) is nn.GELU:
        return name_of(F.gelu, (), {"approximate": module.approximate})
    return name_of(F.silu, (), {"inplace": module.inplace}) if type(module) is nn.SiLU else None


def _reader_behind_dropouts(node: fx.Node, root: fx.GraphModule) -> tuple[nn.Module | None, list[nn.Dropout]]:
    dropouts: list[nn.Dropout] = []
    while isinstance(module := only_reader(node, root), nn.Dropout):
        dropouts.append(module)
        (node,) = node.users
    return module, dropouts
