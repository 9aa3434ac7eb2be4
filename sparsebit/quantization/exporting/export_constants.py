"""`quantizers_as_constants`: replaces quantizers by ones with constant scales while a model is exported.

torch's exporters trace what runs. A `ConstantSite` runs the fake-quant operator with fixed numbers, and carries the
site's name, so each site becomes one recognizable node of the exported graph. Weights that are computed from parameters
alone are evaluated here, in torch: another library may round them to other codes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.errors import DeploymentError
from sparsebit.graph.nodes.aliasing import written_later
from sparsebit.graph.nodes.graph_module import CapturedGraph
from sparsebit.graph.nodes.random_ops import may_draw
from sparsebit.graph.ops.op_table import weight_argument
from sparsebit.numerics import float8
from sparsebit.numerics.fake_quant.operator import OPERATOR, Grid, grid_of
from sparsebit.quantization.ops.bias import INT32, BiasRounding
from sparsebit.quantization.ops.layer_call import current_weight
from sparsebit.quantization.ops.parameter_reads import QuantizedParameter
from sparsebit.quantization.ops.quant_opr import FunctionalWeightedQuantOpr, QShared, WeightedQuantOpr
from sparsebit.quantization.quantizers.base import Quantizer, rounds_by_operator


class ConstantSite(nn.Module):
    """The fake-quant operator with fixed scale and zero point.

    `transform`: the function that the quantizer applies first (DoReFa: tanh). `value`: for a weight, the result of
    `transform`. `is_float8`: rounds to 8-bit floats, by their own operator.
    """

    is_enable = True
    scale: Tensor
    zero_point: Tensor

    def __init__(
        self,
        name: str,
        scale: Tensor,
        zero_point: Tensor,
        grid: Grid,
        *,
        value: Tensor | None = None,
        transform: Callable[[Tensor], Tensor] | None = None,
        is_float8: bool = False,
    ) -> None:
        super().__init__()
        self.training, self.name, self.grid, self.transform, self.is_float8 = False, name, grid, transform, is_float8
        self.register_buffer("scale", scale.detach().float())
        self.register_buffer("zero_point", zero_point.detach().float().round())
        self.register_buffer("value", value)

    def forward(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if self.value is not None:
            x = self.value
        elif self.transform is not None:
            x = self.transform(x)
        if self.is_float8:
            return float8.OPERATOR(x, self.scale, self.grid[0], self.name)
        return OPERATOR(x, self.scale, self.zero_point, *self.grid, "ste", self.name)

    def summary(self) -> str:
        return f"[{self.grid[2]}, {self.grid[3]}]"


@contextlib.contextmanager
def quantizers_as_constants(model: nn.Module) -> Iterator[None]:
    """Inside, enabled quantizers and biases are `ConstantSite`s, except those with their own `fake_quantize`."""
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    marked: list[Quantizer] = []
    try:
        for parent in list(model.modules()):
            for name, child in list(parent._modules.items()):
                if isinstance(child, Quantizer) and child.is_enable:
                    child.enable_export_onnx()
                    marked.append(child)
                if child is not None and _is_swapped(parent, child):
                    swapped.append((parent, name, child))
        computed = _computed_weights(model)
        # After all quantizers are collected: a bias uses the scales of its input and weight.
        sites = [_constant_site(parent, child, computed.get(child)) for parent, _, child in swapped]
        for (parent, name, _), site in zip(swapped, sites, strict=True):
            parent._modules[name] = site
        yield
    finally:
        for parent, name, child in swapped:
            parent._modules[name] = child
        for quantizer in marked:
            quantizer.disable_export_onnx()


def _is_swapped(parent: nn.Module, child: nn.Module) -> bool:
    if isinstance(child, Quantizer):
        return child.is_enable and (_is_own_weight(parent, child) or rounds_by_operator(child))
    if isinstance(child, QShared):
        return child.input_quantizer.is_enable and rounds_by_operator(child.input_quantizer)
    return isinstance(child, BiasRounding) and child.is_enable


def _is_own_weight(parent: nn.Module, quantizer: Quantizer) -> bool:
    return isinstance(parent, WeightedQuantOpr | QuantizedParameter) and quantizer is parent.weight_quantizer


@torch.no_grad()
def _computed_weights(model: nn.Module) -> dict[nn.Module, Tensor]:
    """Weight quantizer -> the weight that a graph computes for it from parameters alone (a standardized one).

    Computed by torch: the same operations in another library may round to other codes.
    """
    found: dict[nn.Module, Tensor] = {}
    for root in (module for module in model.modules() if isinstance(module, CapturedGraph)):
        for node in root.graph.find_nodes(op="call_module"):
            layer = root.get_submodule(str(node.target))
            if not isinstance(layer, FunctionalWeightedQuantOpr) or not layer.weight_quantizer.is_enable:
                continue
            place = weight_argument(layer.row, node.args, node.kwargs)
            weight = None if place is None else node.kwargs[place] if isinstance(place, str) else node.args[place]
            value = _constant_value(root, weight) if isinstance(weight, fx.Node) else None
            if isinstance(value, Tensor):
                found[layer.weight_quantizer] = value
    return found


def _constant_value(root: CapturedGraph, node: fx.Node) -> Any:
    """The node's value, if functions compute it from constant parameters and buffers without random numbers."""
    needed = {node}
    for current in reversed(root.graph.nodes):
        if current in needed:
            needed.update(current.all_input_nodes)
    draws = any(part.op == "call_function" and may_draw(part.target) for part in needed)
    is_fixed = needed.isdisjoint(written_later(root)) and not draws
    if not is_fixed or any(part.op in ("placeholder", "call_module") for part in needed):
        return None
    interpreter = fx.Interpreter(root)
    for part in (part for part in root.graph.nodes if part in needed):
        interpreter.env[part] = interpreter.run_node(part)
    return interpreter.env[node]


@torch.no_grad()
def _constant_site(parent: nn.Module, child: nn.Module, weight: Tensor | None) -> ConstantSite:
    """`weight`: the quantizer's weight if the graph computes it from parameters alone."""
    if isinstance(child, BiasRounding):
        scale = child.scale()
        axis = None if scale.numel() == 1 else 0
        return ConstantSite(child.name, scale, torch.zeros_like(scale), (axis, 0, *INT32))
    if isinstance(child, QShared):
        return _site(child.name, child.input_quantizer)
    assert isinstance(child, Quantizer)
    if _is_own_weight(parent, child):
        if isinstance(parent, QuantizedParameter):
            return _constant_weight(child, parent.parameter)
        return _constant_weight(child, current_weight(parent.get_submodule("op")))
    if weight is not None:
        return _constant_weight(child, weight)
    return _site(child.name, child, transform=child.transform)


def _constant_weight(quantizer: Quantizer, weight: Tensor) -> ConstantSite:
    """A site that rounds to the quantizer's values, also for quantizers with their own rounding rule (AdaRound)."""
    simulated = quantizer.fake_quantize(weight).detach()
    for value in (quantizer.transform(weight).detach(), simulated):
        site = _site(quantizer.name, quantizer, value=value)
        if torch.allclose(site(weight), simulated, rtol=4 * torch.finfo(weight.dtype).eps, atol=0):
            return site
    off = f"{quantizer.TYPE!r} returns weights off the grid of its qparams()"
    raise DeploymentError(f"{quantizer.name}: the quantizer {off}, and a file stores integers on that grid")


def _site(name: str, quantizer: Quantizer, **more: Any) -> ConstantSite:
    spec = quantizer.spec
    return ConstantSite(name, *quantizer.qparams(), grid_of(spec), is_float8=spec.format == "float8", **more)
