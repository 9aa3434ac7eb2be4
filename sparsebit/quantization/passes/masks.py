"""Values that a mask hides with minus infinity, or with a number as large, before a softmax: they have no grid.

On a grid the mask's number would be clipped to the lower end, and what was hidden would be seen; or the grid would
stretch to it, and all other values would be one code. So such values stay in float up to the op that uses the mask up.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from sparsebit.graph.op_rows import OpKind, OpRow

HIDDEN = "a mask hides values in it with minus infinity (or a number as large): it has no grid"
LARGEST = 1e4  # numbers of masks are larger: -1e4 (half precision), -1e9, finfo.min, -inf
_ENDS = frozenset(
    {"matmul", "bmm", "baddbmm", "einsum", "attention", "batch_norm", "layer_norm", "group_norm", "instance_norm"}
    | {"rms_norm", "softmax", "log_softmax", "relu", "relu6", "sigmoid", "hardsigmoid", "hardtanh", "tanh", "clamp"}
)


def hidden_values(graph: fx.Graph, rows: dict[fx.Node, OpRow], python: set[fx.Node]) -> set[fx.Node]:
    """Nodes whose values hold such numbers, as far as constants of the graph show it."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        row = rows.get(node)
        if node in python or node.op not in ("call_module", "call_function", "call_method"):
            continue
        if row is not None and (row.name in _ENDS or row.kind in (OpKind.WEIGHTED, OpKind.FLOAT)):
            continue
        if _has_large_constant(node) or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _has_large_constant(node: fx.Node) -> bool:
    constants: list[float] = []

    def note(value: Any) -> Any:
        if isinstance(value, Real) and not isinstance(value, bool):
            constants.append(float(value))
        return value

    map_aggregate((node.args, node.kwargs), note)
    return any(value <= -LARGEST for value in constants)
