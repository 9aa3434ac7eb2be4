"""In training, a ReLU in front of a quantizer whose grid begins at zero is left to the quantizer.

Rounding onto such a grid clips at zero anyway. So forward and backward of the ReLU, a pass over memory each, are saved;
values and gradients stay the same, bit by bit. In eval mode, in an export and under a compiler the ReLU is there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.graph.capture import Captured
from sparsebit.graph.patterns import module_of, only_reader
from sparsebit.quantization.ops.quant_opr import (
    FunctionalWeightedQuantOpr,
    GatedQuantOpr,
    QIdentity,
    QuantOpr,
    WeightedQuantOpr,
)
from sparsebit.quantization.ops.recipes import relu
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.lsq import LSQ
from sparsebit.quantization.quantizers.recognition import is_hooked, is_replica, is_watched
from sparsebit.quantization.quantizers.uniform import Uniform
from sparsebit.quantization.saved_activations import note_cheap

_FUNCTIONS = (F.relu, torch.relu)
_READERS = (QuantOpr, WeightedQuantOpr, FunctionalWeightedQuantOpr, GatedQuantOpr, QIdentity)


class DeferredReLU(nn.ReLU):
    """A ReLU whose only reader is `reader`'s quantizer; `module`: the one of the model, where it is no function."""

    def __init__(self, reader: QuantOpr | QIdentity, module: nn.Module | None = None) -> None:
        super().__init__()
        self._parts = (reader, reader.input_quantizer, module)  # in a tuple: their homes are elsewhere

    @property
    def quantizer(self) -> Quantizer:
        return self._parts[1]

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # which would look at all of the below again before every call
            return relu(input)
        reader, quantizer, module = self._parts
        if module is not None and _is_changed(module):
            output: Tensor = module(input)
            return output
        is_seen = is_watched(reader) or is_hooked(quantizer) or is_hooked(self, besides=note_cheap)
        if not quantizer.is_rectifying or is_seen or is_replica(self):
            return relu(input)
        quantizer.hand_over("relu", input)
        return input


def defer_relus(captured: Captured) -> None:
    """Replace the ReLUs in question; they defer where `choose` finds that their quantizers can take over."""
    for region in captured.regions.values():
        root = region.graph_module
        for node in list(root.graph.nodes):
            reader = _only_reader(node, root) if _is_relu(node, root) else None
            if reader is None:
                continue
            name = f"{node.name}_deferred"
            root.add_submodule(name, DeferredReLU(reader, module_of(node, root)).train(root.training))
            with root.graph.inserting_before(node):
                deferred = root.graph.call_module(name, (node.all_input_nodes[0],))
            deferred.meta = dict(node.meta)
            node.replace_all_uses_with(deferred)
            root.graph.erase_node(node)
        root.recompile()


def choose(model: nn.Module) -> None:
    """Tell quantizers whether they rectify: grids may have changed since the last time."""
    for module in model.modules():
        if isinstance(module, DeferredReLU):
            module.quantizer.rectifies = _begins_at_zero(module.quantizer)


def _is_relu(node: fx.Node, root: fx.GraphModule) -> bool:
    if node.op == "call_function":
        return node.target in _FUNCTIONS and len(node.all_input_nodes) == 1 and not node.kwargs.get("inplace")
    module = module_of(node, root)
    return type(module) is nn.ReLU and not module.inplace


def _is_changed(module: nn.Module) -> bool:
    """Whether a call of the model's own ReLU would do more than rectify; hooks may come at any time."""
    forward = module.__dict__.get("forward")
    return is_hooked(module, besides=note_cheap) or forward not in (None, relu)


def _only_reader(node: fx.Node, root: fx.GraphModule) -> QuantOpr | QIdentity | None:
    module = only_reader(node, root)
    if type(module) not in _READERS:  # a user's own may do anything with its input
        return None
    assert isinstance(module, (QuantOpr, QIdentity))
    quantizer = module.input_quantizer
    return module if type(quantizer) in (LSQ, Uniform) and quantizer.spec.qmin == 0 else None


def _begins_at_zero(quantizer: Quantizer) -> bool:
    is_fixed = quantizer.is_calibrated and not quantizer.fake_fused and not quantizer.follows
    return is_fixed and not bool(quantizer.zero_point.any())
