"""Fake-quant nodes of an exported program -> `quantized_decomposed` ops, the form that runtimes of PyTorch lower.

A constant (weight) is stored as the integers that the simulation rounds it to, with a dequantize op; a bias is stored
as the numbers that its integers stand for; anything else gets a quantize and a dequantize op. All integers are signed:
codes from 0 to 255 are stored as -128 to 127, with a zero point lower by 128, which are the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

# The import defines the operators.
from torch.ao.quantization.fx import _decomposed  # noqa: F401

from sparsebit.errors import DeploymentError
from sparsebit.numerics import float8
from sparsebit.numerics.fake_quant.operator import OPERATOR
from sparsebit.numerics.plain import codes_of

_OPS = torch.ops.quantized_decomposed
_ATEN = torch.ops.aten
_WIDTHS = {8: torch.int8, 16: torch.int16}
# The key of a quantize op's metadata for its site's name and zero point, as the simulation counts it.
SITE = "sparsebit_site"
_BIAS_MIN = -(1 << 15) - 1  # lower ends are those of biases, in 32 bits
# They only move numbers: runtimes fuse the ops behind them only if these stand between a pair of their own.
MOVES = frozenset(
    {
        *(_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default, _ATEN.flatten.using_ints),
        *(_ATEN.permute.default, _ATEN.transpose.int, _ATEN.squeeze.dim, _ATEN.squeeze.dims, _ATEN.unsqueeze.default),
        *(_ATEN.slice.Tensor, _ATEN.select.int, _ATEN.max_pool2d.default, _ATEN.t.default),
    }
)


def lower_program(module: fx.GraphModule) -> None:
    """Replace every fake-quant node, in place."""
    constants = _constants(module.graph)
    for node in [node for node in module.graph.nodes if node.op == "call_function"]:
        if node.target is float8.OPERATOR:
            raise DeploymentError(
                f"{node.args[-1]}: 8-bit floats have no form in a program; use W.QUANTIZER.TYPE: uniform"
            )
        if node.target is OPERATOR:
            _Lowering(module, node, constants).replace()
    _forget_unused(module)


def quantize_moves(module: fx.GraphModule) -> None:
    """Pairs, on the same grid, around the ops that only move quantized numbers. They change nothing."""
    for node in reversed(list(module.graph.nodes)):
        if node.target not in MOVES or not isinstance(node.args[0], fx.Node) or not _is_quantized(node):
            continue
        grids = {user.args[1:] for user in node.users}
        if len(grids) == 1 and not _grids(node):
            _pair_behind(module, node.args[0], grids.pop(), among=node)
    for node in list(module.graph.nodes):
        grids = _grids(node)
        if len(grids) == 1 and not _is_quantized(node):
            _pair_behind(module, node, grids.pop())
    module.recompile()


def _grids(node: fx.Node) -> set[tuple[Any, ...]]:
    """The grids of the quantized numbers that the node moves; empty if it also reads others, or computes."""
    if node.target is _ATEN.cat.default:
        sources: Any = node.args[0]
    else:
        sources = node.args[:1] if node.target in MOVES else ()
    is_quantized = all(getattr(one, "target", None) is _OPS.dequantize_per_tensor.default for one in sources)
    return {one.args[1:] for one in sources} if is_quantized else set()


def _pair_behind(module: fx.GraphModule, node: fx.Node, grid: tuple[Any, ...], among: fx.Node | None = None) -> None:
    """A quantize and a dequantize op behind `node`, for all its readers or for the one `among` them."""
    with module.graph.inserting_after(node):
        quantized = module.graph.call_function(_OPS.quantize_per_tensor.default, (node, *grid))
    with module.graph.inserting_after(quantized):
        pair = module.graph.call_function(_OPS.dequantize_per_tensor.default, (quantized, *grid))
    for user in list(node.users):
        if user is not quantized and among in (None, user):
            user.replace_input_with(node, pair)


def part_readers(module: fx.GraphModule) -> None:
    """A dequantize op of its own for every reader of quantized numbers: partitions that share one are in a cycle."""
    for node in list(module.graph.nodes):
        if node.target not in (_OPS.dequantize_per_tensor.default, _OPS.dequantize_per_channel.default):
            continue
        for reader in list(node.users)[1:]:
            with module.graph.inserting_after(node):
                other = module.graph.call_function(node.target, node.args)
            reader.replace_input_with(node, other)
    module.recompile()


def _is_quantized(node: fx.Node) -> bool:
    """Whether all its readers quantize it."""
    return all(user.target is _OPS.quantize_per_tensor.default for user in node.users)


class _Lowering:
    """One fake-quant node of the module."""

    def __init__(self, module: fx.GraphModule, node: fx.Node, constants: set[fx.Node]) -> None:
        self.module, self.node, self.graph, self.constants = module, node, module.graph, constants
        arguments: Any = node.args
        self.x, scale, zero_point, self.axis, self.group, self.qmin, self.qmax, _, tag = arguments
        self.scale, self.zero_point = (_constant(module, one).float() for one in (scale, zero_point))
        self.name = str(tag) or "site"
        self.shift = 1 << self._width - 1 if self.qmin >= 0 else 0

    @property
    def _width(self) -> int:
        return 8 if self.qmax - self.qmin < 1 << 8 else 16

    def replace(self) -> None:
        if self.group and self.scale.numel() > 1:
            raise DeploymentError(
                f"{self.name}: groups of {self.group} numbers have no form in this program; use a per-channel QSCHEME"
            )
        value = _value_of(self.module, self.x) if self.x in self.constants else None
        with self.graph.inserting_before(self.node):
            if self.qmin < _BIAS_MIN:
                assert value is not None, self.name
                found = self._stored(OPERATOR(value, self.scale, self.zero_point, *self.node.args[3:]), "")
            else:
                codes = self._call("quantize", self.x) if value is None else self._stored(self._codes(value), ".codes")
                if value is None:
                    codes.meta[SITE] = self.name, self.zero_point
                found = self._call("dequantize", codes)
        if value is not None:
            self.constants.add(found)
        self.node.replace_all_uses_with(found)
        self.graph.erase_node(self.node)

    def _codes(self, value: Tensor) -> Tensor:
        codes = codes_of(value, self.scale, self.zero_point, self.axis, self.group, self.qmin, self.qmax)
        return (codes - self.shift).to(_WIDTHS[self._width])

    def _stored(self, value: Tensor, suffix: str) -> fx.Node:
        name = self.name.replace(".", "_") + suffix.replace(".", "_")
        while hasattr(self.module, name):
            name += "_"
        self.module.register_buffer(name, value.detach())
        return self.graph.get_attr(name)

    def _call(self, verb: str, x: Any) -> fx.Node:
        low, high, dtype = self.qmin - self.shift, self.qmax - self.shift, _WIDTHS[self._width]
        zero_point = self.zero_point - self.shift
        if self.scale.numel() == 1:
            op: Callable[..., Any] = getattr(_OPS, f"{verb}_per_tensor").default
            number = int(zero_point.reshape(-1)[0])
            return self.graph.call_function(op, (x, float(self.scale), number, low, high, dtype))
        op = getattr(_OPS, f"{verb}_per_channel").default
        points = zero_point.reshape(-1).expand(self.scale.numel()).to(torch.int64)
        scale, points_node = self._stored(self.scale.reshape(-1), ".scale"), self._stored(points, ".zero_point")
        return self.graph.call_function(op, (x, scale, points_node, self.axis, low, high, dtype))


def _constant(module: fx.GraphModule, node: Any) -> Tensor:
    value = _value_of(module, node)
    assert value is not None, f"{node} is no constant: quantizers_as_constants makes it one"
    return value


def _constants(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on no input, found in one pass: a residual network has more paths than can be followed."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_made = node.op == "call_function" and bool(node.all_input_nodes) and found.issuperset(node.all_input_nodes)
        if node.op == "get_attr" or is_made:
            found.add(node)
    return found


def _value_of(module: fx.GraphModule, node: Any) -> Tensor | None:
    """What the node is at every call; None if that depends on the inputs. Biases and weights may be computed."""
    if not isinstance(node, fx.Node):
        return None
    value: Any = module
    if node.op == "get_attr" and not any(map(_is_impure, node.users)):
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return value if isinstance(value, Tensor) else None
    if node.op != "call_function" or not callable(node.target) or _is_impure(node):
        return None
    found = {one: _value_of(module, one) for one in node.all_input_nodes}
    if not found or any(value is None for value in found.values()):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: found[one])
    with torch.no_grad():
        value = node.target(*args, **kwargs)
    return value if isinstance(value, Tensor) else None


def _is_impure(node: fx.Node) -> bool:
    """Whether it writes into a tensor, or draws random numbers."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags


def _forget_unused(module: fx.GraphModule) -> None:
    """Without constants that nothing reads any more."""
    module.graph.eliminate_dead_code()
    module.recompile()
    module.delete_all_unused_submodules()
    used = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    for path, owner in list(module.named_modules()):
        for kind in (owner._parameters, owner._buffers):
            for name in [name for name in kind if f"{path}.{name}".lstrip(".") not in used]:
                del kind[name]
