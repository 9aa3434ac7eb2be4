"""Activation functions fused with the quantizer behind them.

ReLU: rounding onto a grid that begins at zero clips at zero anyway, so that forward and backward of the ReLU, a pass
over memory each, are saved. GELU and SiLU in front of a layer, on a GPU: its kernels compute them in the same pass, and
what the function gives is not kept for the backward. Values and gradients stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.graph.aliasing import written_later
from sparsebit.graph.patterns import module_of, only_reader
from sparsebit.kernels.activations import name_of
from sparsebit.numerics import dispatch
from sparsebit.numerics.gradients import Gradient
from sparsebit.quantization.ops.quant_opr import QIdentity, QuantOpr, WeightedQuantOpr
from sparsebit.quantization.ops.repeated_calls import note_grid
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.lsq import LSQ
from sparsebit.quantization.quantizers.uniform import Uniform
from sparsebit.quantization.speed.below_autograd import fuses
from sparsebit.quantization.speed.fused_layer import fused_layer_of
from sparsebit.quantization.speed.fusion_guards import may_fuse
from sparsebit.quantization.speed.recomputation import relu
from sparsebit.quantization.speed.saved_activations import note_quantized
from sparsebit.quantization.speed.training_graph import Draft, FusedStep

Function: TypeAlias = Callable[..., Any]
_RELUS = (F.relu, torch.relu)
_RELU_READERS = (QuantOpr, WeightedQuantOpr, QIdentity)


class FusedActivation(FusedStep):
    """An activation function, dropouts that drop nothing, and what alone reads them: a quantizer, then an op.

    `settings`: keyword arguments of the function's call.
    """

    def __init__(
        self, name: str, activation: nn.Module | Function, settings: dict[str, Any], dropouts: list[nn.Dropout],
        reader: QuantOpr,
    ) -> None:  # fmt: skip
        super().__init__(f"fused_{name}")
        self.name, self.activation, self.settings, self.dropouts, self.reader = (
            name, activation, settings, dropouts, reader,
        )  # fmt: skip
        op = reader._modules.get("op")
        parts = (activation, *dropouts, reader, op)
        self.modules = tuple(part for part in parts if isinstance(part, nn.Module))

    def __call__(self, x: Any) -> Any:
        if may_fuse(self.reader.input_quantizer, self.modules, x) and all(drop.p == 0.0 for drop in self.dropouts):
            found = self.fused(x)
            if found is not None:
                return found
        x = self.activation(x, **self.settings)
        for dropout in self.dropouts:
            x = dropout(x)
        return self.reader(x)

    def fused(self, x: Tensor) -> Any:
        """In front of a layer, on a GPU; None where that is not so."""
        layer = fused_layer_of(self.reader) if isinstance(self.reader, WeightedQuantOpr) else None
        if layer is None or not x.requires_grad or not fuses(x):
            return None
        return layer.compute(x, activation=self.name)


class FusedReLU(FusedActivation):
    """A ReLU, and a quantizer that may begin at zero."""

    _known: tuple[Tensor, int, bool] | None = None  # the zero point that was asked, its version, and the answer

    def fused(self, x: Tensor) -> Any:
        reader, quantizer = self.reader, self.reader.input_quantizer
        if not self._begins_at_zero(quantizer):
            return None
        gradient: Gradient = "relu_lsq" if quantizer.GRADIENT == "lsq" else "relu_ste"
        if isinstance(reader, WeightedQuantOpr):
            layer = fused_layer_of(reader)
            return None if layer is None else layer.compute(x, gradient)
        y = dispatch.fake_quantize(x, *quantizer.operands(), quantizer.spec, gradient=gradient, tag=quantizer.name)
        note_quantized(quantizer, x, y)
        if not isinstance(reader, QIdentity):
            return reader.compute(y)
        if reader.notes_grid:
            note_grid(y, quantizer)
        return y

    def _begins_at_zero(self, quantizer: Quantizer) -> bool:
        """Whether all zero points are 0. On a GPU the answer waits for the GPU: it is kept until they change."""
        zero_point = quantizer.zero_point
        if self._known is None or self._known[0] is not zero_point or self._known[1] != zero_point._version:
            self._known = (zero_point, zero_point._version, not bool(zero_point.detach().any()))
        return self._known[2]


def fuse_activations(draft: Draft) -> None:
    """Replace the activation functions in question, with what reads them, by fused steps."""
    written = {draft.copies[node] for node in written_later(draft.root) if node in draft.copies}
    for node in list(draft.graph.nodes):
        if len(node.all_input_nodes) != 1 or node in written or node.all_input_nodes[0] in written:
            continue
        is_relu = _is_relu(node, draft.root)
        name = "relu" if is_relu else _name(node, draft.root)
        if name is None:
            continue
        dropouts = _dropouts_behind(node, draft.root)
        last = dropouts[-1] if dropouts else node
        reader = only_reader(last, draft.root)
        if not (_rectifies(reader) and not dropouts if is_relu else type(reader) is WeightedQuantOpr):
            continue
        assert isinstance(reader, QuantOpr)
        (call,) = last.users
        if len(call.args) != 1 or call.kwargs:
            continue
        settings = {key: value for key, value in node.kwargs.items() if key != "input"}
        kind = FusedReLU if is_relu else FusedActivation
        activation = module_of(node, draft.root) or (relu if is_relu else node.target)
        modules = [module_of(dropout, draft.root) for dropout in dropouts]
        step = kind(name, activation, {} if is_relu else settings, modules, reader)  # type: ignore[arg-type]
        draft.replace(call, step, (node.all_input_nodes[0],))
        draft.drop_unread(*reversed(dropouts), node)


def _is_relu(node: fx.Node, root: fx.GraphModule) -> bool:
    if node.op == "call_function":
        return node.target in _RELUS and not node.kwargs.get("inplace") and len(node.args) < 2
    module = module_of(node, root)
    return type(module) is nn.ReLU and not module.inplace


def _rectifies(reader: nn.Module | None) -> bool:
    """Whether its quantizer can stand for a ReLU too; a user's own may do anything with its input."""
    if type(reader) not in _RELU_READERS:
        return False
    assert isinstance(reader, QuantOpr)
    quantizer = reader.input_quantizer
    return type(quantizer) in (LSQ, Uniform) and quantizer.spec.qmin == 0


def _name(node: fx.Node, root: fx.GraphModule) -> str | None:
    if node.op == "call_function":
        return name_of(node.target, node.args[1:], node.kwargs)
    module = module_of(node, root)
    if type(module) is nn.GELU:
        return name_of(F.gelu, (), {"approximate": module.approximate})
    return name_of(F.silu, (), {"inplace": module.inplace}) if type(module) is nn.SiLU else None


def _dropouts_behind(node: fx.Node, root: fx.GraphModule) -> list[fx.Node]:
    """Those that alone read it, one behind the other."""
    found: list[fx.Node] = []
    while isinstance(only_reader(node, root), nn.Dropout):
        (node,) = node.users
        found.append(node)
    return found
