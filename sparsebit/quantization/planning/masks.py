"""Finds tensors with attention masks in them: -inf or a number as large, added before a softmax. No grid fits them.

On a grid the mask's number would be clipped to the lower end, and hidden values would become visible; or the grid would
stretch to it, and all other values would share one code. So such values stay in float up to the op whose result does
not contain them any more (a softmax, a product, a layer with weights).

Two sources: constants in the graph (`masked_fill(-1e9)`, a buffer), and tensors that may be masks at run time although
the example has none (an input of the graph, or a comparison, that is added to the input of a softmax). Called by
`plan.py`; calibration checks the observed values again (`observers/magnitudes.py`).
"""

from __future__ import annotations

from numbers import Real
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from sparsebit.graph.ops.op_rows import OpKind, OpRow

LARGEST = 1e4  # numbers of masks are larger: -1e4 (half precision), -1e9, finfo.min, -inf
# Ops whose result does not contain the mask's numbers any more: products, norms, and functions that saturate.
_ENDS = frozenset(
    {"matmul", "bmm", "baddbmm", "einsum", "attention", "batch_norm", "layer_norm", "group_norm", "instance_norm"}
    | {"rms_norm", "softmax", "log_softmax", "relu", "relu6", "sigmoid", "hardsigmoid", "hardtanh", "tanh"}
)
SOFTMAX = ("softmax", "log_softmax")
_ARITHMETIC = ("add", "sub", "mul", "div")
_JOINS = (*_ARITHMETIC, "cat", "clamp", "max")
_FILLS = ("where", "masked_fill", "masked_fill_")
_FILLED = 32.0  # a mask may fill the input of a softmax with -100: afterwards, exp(-32) is zero on every grid
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "isin", "logical_not", "logical_and", "logical_or", "invert")
_LIMITS = ("clamp", "max")  # the larger or the smaller of two values, or one between limits


def hidden_values(graph: fx.Graph, rows: dict[fx.Node, OpRow], python: set[fx.Node]) -> set[fx.Node]:
    """Nodes whose tensor holds a mask's numbers, or may at run time. `python`: nodes whose values are not tensors."""
    found = _given_masks(graph, rows, python)
    softmax_inputs = set(_nodes_before_softmax(graph, rows))
    large: set[fx.Node] = set()  # Python numbers that come from a type's limits
    for node in graph.nodes:
        if node.op == "get_attr" and _is_mask(node):
            found.add(node)
        reads_large = not large.isdisjoint(node.all_input_nodes)
        if _is_limit(node) or (node in python and reads_large):
            large.add(node)
        elif node not in python and node.op.startswith("call_") and not _consumes_mask(node, rows):
            fills = node in softmax_inputs and _name(node) in _FILLS
            is_given = _has_large_constant(node, _FILLED if fills else LARGEST) or reads_large
            if node in rows and rows[node].name in _LIMITS:
                is_hidden = _keeps_hidden(node, found, python, is_large=is_given)
            else:
                is_hidden = is_given or not found.isdisjoint(node.all_input_nodes)
            found.update([node] if is_hidden else [])
    return found


def before_softmax(graph: fx.Graph, rows: dict[fx.Node, OpRow]) -> set[fx.Node]:
    """Every softmax, and the sums, products, moves, joins and limits whose result a softmax reads."""
    return {node for node, row in rows.items() if row.name in SOFTMAX} | set(_nodes_before_softmax(graph, rows))


def _is_limit(node: fx.Node) -> bool:
    """`torch.finfo(dtype).min`, or `.max`."""
    is_read = node.op == "call_function" and node.target is getattr and node.args[1:] in (("min",), ("max",))
    source = node.args[0] if is_read else None
    return isinstance(source, fx.Node) and source.target is torch.finfo


def _keeps_hidden(node: fx.Node, found: set[fx.Node], python: set[fx.Node], *, is_large: bool) -> bool:
    """Whether hidden values pass a clamp or a maximum; the limits of ordinary values may have any size.

    A clamp lets them pass if its limit is as large. So does a maximum of two tensors if both contain such values.
    """
    values = [source for source in node.all_input_nodes if source not in python]
    if not values or values[0] not in found:
        return False
    is_clamp = "clamp" in str(node.target) or "clip" in str(node.target)
    return is_large or set(values[1:]) & found != set() or (not is_clamp and len(values) == 1)


def _is_mask(node: fx.Node) -> bool:
    """Whether the node reads a buffer or constant that contains a mask's number."""
    value = attrgetter(str(node.target))(node.graph.owning_module)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_meta:
        return False
    return value.is_floating_point() and bool((value <= -LARGEST).any())


def _consumes_mask(node: fx.Node, rows: dict[fx.Node, OpRow]) -> bool:
    row = rows.get(node)
    return row is not None and (row.name in _ENDS or row.kind in (OpKind.WEIGHTED, OpKind.FLOAT))


def _given_masks(graph: fx.Graph, rows: dict[fx.Node, OpRow], python: set[fx.Node]) -> set[fx.Node]:
    """Tensors that may be masks at run time, although the calibration data may contain no masked value.

    These are inputs of the graph, comparisons, and what is computed from them and from buffers by light ops alone, if
    the result is added to the input of a softmax. An input that a layer or a product reads as well is not a mask.
    """
    origins: dict[fx.Node, set[fx.Node]] = {}
    activations: set[fx.Node] = set()
    for node in graph.nodes:
        tensors = [source for source in node.all_input_nodes if source not in python]
        if node.op == "placeholder" or _is_comparison(node):
            origins[node] = {node}
        elif node.op == "get_attr":
            origins[node] = set()
        elif node.op == "call_module" or _consumes_mask(node, rows):
            activations.update(*(origins.get(source, ()) for source in tensors))
        elif node.op in ("call_function", "call_method") and tensors and origins.keys() >= set(tensors):
            origins[node] = set().union(*(origins[source] for source in tensors))
    sums = (node for node in _nodes_before_softmax(graph, rows) if rows[node].name in ("add", "sub"))
    added = [source for node in sums if node not in origins for source in node.all_input_nodes]
    waiting = [source for source in added if origins.get(source) and activations.isdisjoint(origins[source])]
    for node in waiting:  # the list grows while it is read
        before = () if _is_comparison(node) else node.all_input_nodes
        waiting += [source for source in before if origins.get(source) and source not in waiting]
    return set(waiting)


def _is_comparison(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and _name(node) in _COMPARISONS


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _nodes_before_softmax(graph: fx.Graph, rows: dict[fx.Node, OpRow]) -> list[fx.Node]:
    """Sums, products and moves whose result a softmax reads."""
    softmaxes = (node for node in graph.nodes if node in rows and rows[node].name in SOFTMAX)
    waiting = [source for node in softmaxes for source in node.all_input_nodes[:1]]
    found: dict[fx.Node, None] = {}
    for node in waiting:
        row = rows.get(node)
        if node not in found and row is not None and (row.kind is OpKind.TRANSPARENT or row.name in _JOINS):
            found[node] = None
            waiting += node.all_input_nodes
    return list(found)


def _has_large_constant(node: fx.Node, least: float) -> bool:
    constants: list[float] = []

    def note(value: Any) -> Any:
        if isinstance(value, Real) and not isinstance(value, bool):
            constants.append(float(value))
        return value

    map_aggregate((node.args, node.kwargs), note)
    return any(value <= -least for value in constants)
