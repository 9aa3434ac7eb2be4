"""The last sums of a compiled backward at once: each learned scale has one, and starting it is all that it costs.

`JoinSums` is for inductor's option `post_grad_custom_post_pass`.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort

from sparsebit.numerics.compilation import made_aside, shows_kernels

SHORT = 1 << 15  # elements: at most what the programs of a kernel have found

_LIBRARY: Any = torch.library.Library("sparsebit", "FRAGMENT")
_LIBRARY.define("sum_each(Tensor[] vectors) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


@lru_cache(maxsize=64)
def _rows(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Any]:
    from sparsebit.numerics.triton_kernels import Launch
    from sparsebit.numerics.triton_programs import sum_ragged

    starts = made_aside(lambda: torch.tensor([0, *accumulate(sizes)], device=device))
    return starts, Launch(sum_ragged, len(sizes), (), (1024,))


def _sum_each(vectors: list[Tensor]) -> Tensor:
    if not shows_kernels(vectors[0]):
        return torch.stack([vector.sum() for vector in vectors])
    x = torch.cat(vectors)
    y = torch.empty(len(vectors), dtype=x.dtype, device=x.device)
    starts, launch = _rows(tuple(len(vector) for vector in vectors), x.device)
    launch((x, starts, y), ())
    return y


_LIBRARY.impl("sum_each", _sum_each, "CompositeExplicitAutograd")
torch.library.register_fake("sparsebit::sum_each", lambda vectors: vectors[0].new_empty(len(vectors)), lib=_LIBRARY)


class JoinSums(CustomGraphPass):
    """Sums of vectors that are short, or sums themselves, become one node."""

    def __call__(self, graph: fx.Graph) -> None:
        sums = _independent(graph)
        for device in {_value(node).device for node in sums}:
            alike = [node for node in sums if _value(node).device == device]
            if len(alike) > 1:
                _join(graph, alike)
        stable_topological_sort(graph)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _independent(graph: fx.Graph) -> list[fx.Node]:
    """Those that depend on none of the others."""
    found: list[fx.Node] = []
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
        elif _is_last_sum(node):
            found.append(node)
            behind.add(node)
    return found


def _join(graph: fx.Graph, sums: list[fx.Node]) -> None:
    with graph.inserting_after(sums[-1]):
        vectors = [node.args[0] for node in sums]
        joined = graph.call_function(torch.ops.sparsebit.sum_each.default, (vectors,))
    joined.meta["val"] = _value(sums[0]).new_empty(len(sums))
    for place, node in enumerate(sums):
        with graph.inserting_after(joined):
            part = graph.call_function(torch.ops.aten.select.int, (joined, 0, place))
        part.meta["val"] = _value(node)
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def _is_last_sum(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.sum.default or len(node.args) != 1 or node.kwargs:
        return False
    (vector,) = node.args
    assert isinstance(vector, fx.Node)
    value = vector.meta.get("val")
    if not isinstance(value, Tensor) or value.ndim != 1 or value.dtype != torch.float32:
        return False
    return _is_sum(vector) or (isinstance(value.shape[0], int) and value.shape[0] <= SHORT)


def _is_sum(node: fx.Node) -> bool:
    """Behind a factor and a view or two."""
    for _ in range(4):
        if node.target is torch.ops.aten.sum.dim_IntList:
            return True
        (source, *_) = node.args or (None,)
        if not isinstance(source, fx.Node):
            return False
        node = source
    return False


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value
