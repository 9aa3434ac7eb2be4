"""In training, the parts that several selects take from one tensor (q, k and v of an attention) are taken at once.

The backward of a select fills a tensor of the whole's size with zeros, and all of those are added up; that of `unbind`
stacks the parts. An export has the selects.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx

from sparsebit.graph.capture import Captured


def parts(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    if torch.compiler.is_exporting():
        return tuple(x.select(dim, index) for index in range(x.shape[dim]))
    return x.unbind(dim)


def join_selects(captured: Captured) -> None:
    for region in captured.regions.values():
        root = region.graph_module
        groups: dict[tuple[Any, ...], list[fx.Node]] = defaultdict(list)
        for node in root.graph.nodes:
            if node.op == "call_method" and node.target == "select" and len(node.args) == 3 and not node.kwargs:
                source, dim, index = node.args
                if isinstance(dim, int) and isinstance(index, int):
                    groups[source, dim].append(node)
        for (source, dim), selects in groups.items():
            if len(selects) < 2:
                continue
            with root.graph.inserting_before(selects[0]):
                joined = root.graph.call_function(parts, (source, dim))
            for node in selects:
                node.op, node.target, node.args = "call_function", operator.getitem, (joined, node.args[2])
        root.recompile()
