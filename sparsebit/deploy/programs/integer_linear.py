"""`lay_out_linears`: linear layers on 8-bit codes as products of integers, which torch has a fast kernel for.

`x` on a grid with scale `s` and zero point `z`, `w` on one with scales `t` per output: `x @ w.T + b` is
`(codes(x) @ codes(w).T - z * sums(codes(w))) * (s * t) + b`. The product, and the term with `z`, are exact in int32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.ao.quantization.fx import _decomposed  # noqa: F401 (the import defines the operators)

# The import defines the operators.
from torch.ao.quantization.fx import _decomposed  # noqa: F401

_OPS = torch.ops.quantized_decomposed
_PER_CHANNEL = _OPS.dequantize_per_channel.default
_ATEN = torch.ops.aten
_LARGEST_INPUTS = (1 << 31) // (128 * 256) - 1  # of a layer, so that no sum leaves int32


def lay_out_linears(module: fx.GraphModule) -> None:
    """In place: `linear(dequantize(x), dequantize(weight), bias)` on int8 codes -> `_int_mm`."""
    for node in module.graph.find_nodes(op="call_function", target=_ATEN.linear.default):
        x, weight, bias = (*node.args, None)[:3]
        if not _is_int8(x, _OPS.dequantize_per_tensor.default) or not isinstance(weight, fx.Node):
            continue
        found = _weight_of(module, weight)
        if found is None or found[0].shape[1] > _LARGEST_INPUTS:
            continue
        product = _product(module, node, x, weight, bias, found)
        node.replace_all_uses_with(product)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()


def _is_int8(node: Any, op: Any) -> bool:
    """Whether the node is this dequantize op on int8; the type is its sixth argument, or its seventh per channel."""
    return isinstance(node, fx.Node) and node.target is op and torch.int8 in node.args[5:7]


def _weight_of(module: fx.GraphModule, weight: fx.Node) -> tuple[Tensor, Tensor] | None:
    """The codes (outputs, inputs) and the scales (outputs) of a stored symmetric weight; None for another one."""
    codes: Any = weight.args[0] if weight.args else None
    if not isinstance(codes, fx.Node) or codes.op != "get_attr":
        return None
    values = _attribute(module, codes)
    if _is_int8(weight, _PER_CHANNEL) and weight.args[3] == 0:
        scales, zeros = (_attribute(module, one) for one in weight.args[1:3])
        return None if zeros.any() else (values, scales.float())
    if _is_int8(weight, _OPS.dequantize_per_tensor.default) and weight.args[2] == 0:
        return values, torch.full((values.shape[0],), float(weight.args[1]))  # type: ignore[arg-type]
    return None


def _product(
    module: fx.GraphModule, node: fx.Node, x: fx.Node, weight: fx.Node, bias: Any, found: tuple[Tensor, Tensor]
) -> fx.Node:
    codes, scales = found
    source, scale, zero_point = x.args[0], float(x.args[1]), int(x.args[2])  # type: ignore[arg-type]
    name = str(weight.args[0].target)  # type: ignore[union-attr]
    graph = module.graph
    with graph.inserting_before(node):
        rows = graph.call_function(_ATEN.reshape.default, (source, [-1, codes.shape[1]]))
        turned = graph.call_function(_ATEN.t.default, (weight.args[0],))
        sums = graph.call_function(_ATEN._int_mm.default, (rows, turned))
        if zero_point:
            shift = -zero_point * codes.sum(1, dtype=torch.int32)
            sums = graph.call_function(_ATEN.add.Tensor, (sums, _stored(module, f"{name}_shift", shift)))
        floats = graph.call_function(_ATEN.to.dtype, (sums, torch.float32))
        step = _stored(module, f"{name}_step", scale * scales)
        result = graph.call_function(_ATEN.mul.Tensor, (floats, step))
        if bias is not None:
            result = graph.call_function(_ATEN.add.Tensor, (result, bias))
        sizes = [_size(graph, source, axis) for axis in range(node.meta["val"].dim() - 1)]
        return graph.call_function(_ATEN.reshape.default, (result, [*sizes, codes.shape[0]]))


def _size(graph: fx.Graph, source: Any, axis: int) -> Any:
    return graph.call_function(_ATEN.sym_size.int, (source, axis))


def _attribute(module: fx.GraphModule, node: Any) -> Tensor:
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor)
    return value


def _stored(module: fx.GraphModule, name: str, value: Tensor) -> fx.Node:
    name = name.replace(".", "_")
    module.register_buffer(name, value)
    return module.graph.get_attr(name)
