"""Values that a mask hides with minus infinity, or with a number as large, before a softmax: they have no grid.

On a grid the mask's number would be clipped to the lower end, and what was hidden would be seen; or the grid would
stretch to it, and all other values would be one code. So such values stay in float up to the op that uses the mask up.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from sparsebit.graph.op_rows import OpKind, OpRow

HIDDEN = "a mask hides values in it with minus infinity (or a number as large): it has no grid"
LARGEST = 1e4  # numbers of masks are larger: -1e4 (half precision), -1e9, finfo.min, -inf
_ENDS = frozenset(
    {"matmul", "bmm", "baddbmm", "einsum", "attention", "batch_norm", "layer_norm", "group_norm", "instance_norm"}
    | {"rms_norm", "softmax", "log_softmax", "relu", "relu6", "sigmoid", "hardsigmoid", "hardtanh", "tanh", "clamp"}
)
_SOFTMAX = ("softmax", "log_softmax")
_ARITHMETIC = ("add", "sub", "mul", "div")


def hidden_values(graph: fx.Graph, rows: dict[fx.Node, OpRow], python: set[fx.Node]) -> set[fx.Node]:
    """Nodes whose values hold such numbers, as far as constants of the graph show it, or may hold them: masks that are
    inputs of the graph, and what they are added to in front of a softmax.
    """
    found = _given_masks(graph, rows, python)
    for node in graph.nodes:
        if node.op == "get_attr" and _is_mask(node):
            found.add(node)
        if node in python or node.op not in ("call_module", "call_function", "call_method"):
            continue
        if _uses_up(node, rows):
            continue
        if _has_large_constant(node) or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _is_mask(node: fx.Node) -> bool:
    """Whether it reads a buffer or a constant that holds such a number."""
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    is_constant = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    if not is_constant or value.layout is not torch.strided or not value.is_floating_point() or value.is_meta:
        return False
    return value.numel() > 0 and bool((value <= -LARGEST).any())


def _uses_up(node: fx.Node, rows: dict[fx.Node, OpRow]) -> bool:
    row = rows.get(node)
    return row is not None and (row.name in _ENDS or row.kind in (OpKind.WEIGHTED, OpKind.FLOAT))


def _given_masks(graph: fx.Graph, rows: dict[fx.Node, OpRow], python: set[fx.Node]) -> set[fx.Node]:
    """Inputs of the graph, and what light ops make of them alone, that are added to what a softmax reads.

    An input that a layer or a product reads too is no mask.
    """
    origins: dict[fx.Node, set[fx.Node]] = {}
    activations: set[fx.Node] = set()
    for node in graph.nodes:
        tensors = [source for source in node.all_input_nodes if source not in python]
        if node.op == "placeholder":
            origins[node] = {node}
        elif node.op == "call_module" or _uses_up(node, rows):
            activations.update(*(origins.get(source, ()) for source in tensors))
        elif node.op in ("call_function", "call_method") and tensors and origins.keys() >= set(tensors):
            origins[node] = set().union(*(origins[source] for source in tensors))
    return {
        source
        for node in _in_front_of_softmax(graph, rows)
        if rows[node].name in ("add", "sub") and node not in origins
        for source in node.all_input_nodes
        if source in origins and activations.isdisjoint(origins[source])
    }


def _in_front_of_softmax(graph: fx.Graph, rows: dict[fx.Node, OpRow]) -> list[fx.Node]:
    """Sums, products and moves whose result a softmax reads."""
    names = {node: row.name for node, row in rows.items()}
    waiting = [source for node in graph.nodes if names.get(node) in _SOFTMAX for source in node.all_input_nodes[:1]]
    found: dict[fx.Node, None] = {}
    for node in waiting:
        row = rows.get(node)
        if node not in found and row is not None and (row.kind is OpKind.TRANSPARENT or row.name in _ARITHMETIC):
            found[node] = None
            waiting += node.all_input_nodes
    return list(found)


def _has_large_constant(node: fx.Node) -> bool:
    constants: list[float] = []

    def note(value: Any) -> Any:
        if isinstance(value, Real) and not isinstance(value, bool):
            constants.append(float(value))
        return value

    map_aggregate((node.args, node.kwargs), note)
    return any(value <= -LARGEST for value in constants)
