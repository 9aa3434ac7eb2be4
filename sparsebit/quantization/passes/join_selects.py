"""In training, the parts that several selects take from one tensor (q, k and v of an attention) are taken at once.

The backward of a select fills a tensor of the whole's size with zeros, and all of those are added up; that of `unbind`
stacks the parts. Where a quantizer stands behind each part, the node knows it (`QuantizedParts`), and may quantize all
of them at once. An export has the selects.
"""

from __future__ import annotations

import operator
from collections import defaultdict

from torch import fx

from sparsebit.graph.aliasing import written_later
from sparsebit.graph.capture import Captured
from sparsebit.graph.patterns import only_reader
from sparsebit.quantization.ops.quant_opr import QIdentity
from sparsebit.quantization.ops.quantized_parts import QuantizedParts, parts


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
                joined = _join(root.graph, source, dim, selects, before=nodes[0])
                _show_quantizers(joined, source, dim, tuple(selects), root)
        root.recompile()


def _join(graph: fx.Graph, source: fx.Node, dim: int, selects: dict[int, list[fx.Node]], *, before: fx.Node) -> fx.Node:
    with graph.inserting_before(before):
        joined = graph.call_function(parts, (source, dim, tuple(selects)))
    for place, same in enumerate(selects.values()):
        for node in same:
            node.op, node.target, node.args = "call_function", operator.getitem, (joined, place)
    return joined


def _show_quantizers(
    joined: fx.Node, source: fx.Node, dim: int, indices: tuple[int, ...], root: fx.GraphModule
) -> None:
    """Where quantizers alone read the parts, these are taken by a module that knows them."""
    behind = {item.args[1]: only_reader(item, root) for item in joined.users}
    readers = [behind.get(place) for place in range(len(indices))]
    known = [reader for reader in readers if isinstance(reader, QIdentity)]
    if len(known) != len(joined.users) or len(known) != len(indices):
        return
    name = f"{joined.name}_quantized"
    root.add_submodule(name, QuantizedParts(dim, indices, known).train(root.training))
    joined.op, joined.target, joined.args = "call_module", name, (source,)
