"""In training, the parts that several selects take from one tensor (q, k and v of an attention) are taken at once.

The backward of a select fills a tensor of the whole's size with zeros, and all of those are added up; that of `unbind`
stacks the parts. An export has the selects.
"""

from __future__ import annotations

import operator
from collections import defaultdict

from torch import Tensor, fx

from sparsebit.graph.aliasing import written_later
from sparsebit.graph.capture import Captured
from sparsebit.numerics.compilation import is_exporting


def parts(x: Tensor, dim: int, indices: tuple[int, ...]) -> tuple[Tensor, ...]:
    """`x.select(dim, index)` for each of them."""
    if is_exporting() or x.shape[dim] != len(indices):  # a few out of many stay as they are
        return tuple(x.select(dim, index) for index in indices)
    whole = x.unbind(dim)
    return tuple(whole[index] for index in indices)


def join_selects(captured: Captured) -> None:
    for region in captured.regions.values():
        root = region.graph_module
        written = written_later(root)  # what `unbind` gives may not be written into
        groups: dict[tuple[fx.Node, int], dict[int, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
        for node in root.graph.nodes:
            if node.op == "call_method" and node.target == "select" and len(node.args) == 3 and not node.kwargs:
                source, dim, index = node.args
                if isinstance(source, fx.Node) and isinstance(dim, int) and isinstance(index, int):
                    groups[source, dim][index].append(node)
        for (source, dim), selects in groups.items():
            nodes = [node for same in selects.values() for node in same]
            if len(selects) > 1 and written.isdisjoint(nodes):
                _join(root.graph, source, dim, selects, before=nodes[0])
        root.recompile()


def _join(graph: fx.Graph, source: fx.Node, dim: int, selects: dict[int, list[fx.Node]], *, before: fx.Node) -> None:
    with graph.inserting_before(before):
        joined = graph.call_function(parts, (source, dim, tuple(selects)))
    for place, same in enumerate(selects.values()):
        for node in same:
            node.op, node.target, node.args = "call_function", operator.getitem, (joined, place)
