"""Rewrites of a training graph that fuse activation functions with the quantizer after them.

ReLU: rounding to a grid that begins at zero clips at zero anyway, so the forward and backward of the ReLU, one pass
over memory each, are saved. GELU and SiLU before a layer, on a GPU: its kernels compute them in the same pass, and
the function's output is not kept for the backward. Values and gradients stay the same.

Whether fusing is allowed (`may_fuse`) and whether the grid begins at zero may change from step to step, so each fused
step decides at every call, and otherwise calls the modules one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.graph.nodes.aliasing import written_later
from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.rewriting.patterns import is_itself, only_reader
from sparsebit.kernels.activations import name_of
from sparsebit.numerics.fake_quant import dispatch
from sparsebit.numerics.fake_quant.gradients import Gradient
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
    """An activation function, dropouts with p = 0, and their only reader: a quantizer, then an op.

    `settings`: keyword arguments of the function's call.
    """

    def __init__(
        self,
        name: str,
        activation: nn.Module | Function,
        settings: dict[str, Any],
        dropouts: list[nn.Dropout],
        reader: QuantOpr,
    ) -> None:
        super().__init__(f"fused_{name}")
        self.name, self.reader = name, reader
        self.activation, self.settings, self.dropouts = activation, settings, dropouts
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
        """The fused result before a layer, on a GPU; None if that is not possible."""
        layer = fused_layer_of(self.reader) if isinstance(self.reader, WeightedQuantOpr) else None
        if layer is None or not x.requires_grad or not fuses(x):
            return None
        return layer.compute(x, activation=self.name)


class FusedReLU(FusedActivation):
    """A ReLU, and a quantizer whose grid may begin at zero."""

    _known: tuple[Tensor, int, bool] | None = None  # the last checked zero point, its version, and the result

    def fused(self, x: Tensor) -> Any:
        reader, quantizer = self.reader, self.reader.input_quantizer
        if not _may_begin_at_zero(quantizer) or not self._begins_at_zero(quantizer):
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
        """Whether all zero points are 0. Cached until they change on a GPU, because reading a value waits for it."""
        zero_point = quantizer.zero_point
        if zero_point.is_cpu:
            return not bool(zero_point.detach().any())
        if self._known is None or self._known[0] is not zero_point or self._known[1] != zero_point._version:
            self._known = (zero_point, zero_point._version, not bool(zero_point.detach().any()))
        return self._known[2]


def fuse_relus(draft: Draft) -> None:
    """Fuse ReLUs, each with the only quantizer that reads it."""
    for node in _single_input_calls(draft):
        if not _is_relu(node, draft.root):
            continue
        reader = only_reader(node, draft.root)
        if _rectifies(reader):
            _fuse(draft, FusedReLU("relu", module_of(node, draft.root) or relu, {}, [], reader), [node])


def fuse_activations(draft: Draft) -> None:
    """Fuse GELU and SiLU, each with the only layer that reads it, before or after dropouts."""
    for node in _single_input_calls(draft):
        name = _name(node, draft.root)
        if name is None:
            continue
        dropouts = _dropouts_behind(node, draft.root)
        chain = [node, *dropouts]
        reader = only_reader(chain[-1], draft.root)
        if type(reader) is WeightedQuantOpr:
            settings = {key: value for key, value in node.kwargs.items() if key != "input"}
            modules: list[Any] = [module_of(dropout, draft.root) for dropout in dropouts]
            activation: Any = module_of(node, draft.root) or node.target
            _fuse(draft, FusedActivation(name, activation, settings, modules, reader), chain)


def _single_input_calls(draft: Draft) -> list[fx.Node]:
    """Calls of one tensor, except where memory is written later: a fused step would read it after the write."""
    written = {draft.copies[node] for node in written_later(draft.root) if node in draft.copies}
    calls = [node for node in draft.graph.nodes if len(node.all_input_nodes) == 1]
    return [node for node in calls if written.isdisjoint((node, node.all_input_nodes[0]))]


def _fuse(draft: Draft, step: FusedActivation, chain: list[fx.Node]) -> None:
    """Replace the nodes of `chain`, and the only reader of the last one, by `step`."""
    (call,) = chain[-1].users
    if len(call.args) == 1 and not call.kwargs:
        draft.replace(call, step, (chain[0].all_input_nodes[0],))
        draft.drop_unread(*reversed(chain))


def _is_relu(node: fx.Node, root: fx.GraphModule) -> bool:
    if node.op == "call_function":
        return node.target in _RELUS and not node.kwargs.get("inplace") and len(node.args) < 2
    module = module_of(node, root)
    return type(module) is nn.ReLU and not module.inplace


def _rectifies(reader: nn.Module | None) -> TypeGuard[QuantOpr]:
    """Whether its quantizer can replace a ReLU, too. A class of a user's may do anything with its input."""
    if not is_itself(reader, QuantOpr) or type(reader) not in _RELU_READERS:
        return False
    return _may_begin_at_zero(reader.input_quantizer)


def _may_begin_at_zero(quantizer: Quantizer) -> bool:
    """Whether its grid begins at zero if its zero point is 0, and its zero point is not learned."""
    return type(quantizer) in (LSQ, Uniform) and quantizer.spec.qmin == 0


def _name(node: fx.Node, root: fx.GraphModule) -> str | None:
    if node.op == "call_function":
        return name_of(node.target, node.args[1:], node.kwargs)
    module = module_of(node, root)
    if type(module) is nn.GELU:
        return name_of(F.gelu, (), {"approximate": module.approximate})
    return name_of(F.silu, (), {"inplace": module.inplace}) if type(module) is nn.SiLU else None


def _dropouts_behind(node: fx.Node, root: fx.GraphModule) -> list[fx.Node]:
    """The chain of dropouts after a node, each the only reader of the one before."""
    found: list[fx.Node] = []
    while isinstance(only_reader(node, root), nn.Dropout):
        (node,) = node.users
        found.append(node)
    return found
