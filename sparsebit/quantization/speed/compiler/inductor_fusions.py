"""`FuseQuantizers`: fuses ops with the fake-quant after them in inductor's input graph, if gradients are recorded.

It is given to inductor as the option `pre_grad_custom_pass` (`inductor_options.py`).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort

from sparsebit.kernels import activations
from sparsebit.kernels.activations import name_of
from sparsebit.kernels.compilation import shows_kernels
from sparsebit.numerics.fake_quant.memory_layout import stack_form
from sparsebit.numerics.fake_quant.operator import OPERATOR
from sparsebit.quantization.speed import activation_fake_quant, stacked_fake_quant


class FuseQuantizers(CustomGraphPass):
    """Replaces activation functions and parts of a tensor, with the only quantizers that read them, by one operator."""

    def __call__(self, graph: fx.Graph) -> None:
        _unbind_selects(graph)
        for node in graph.find_nodes(op="call_method", target="unbind"):
            _fuse_stack(graph, node)
        for node in graph.find_nodes(op="call_function", target=OPERATOR):
            _fuse_activation(graph, node)
        stable_topological_sort(graph)

    def uuid(self) -> Any:
        rooms = (activation_fake_quant, activations, stacked_fake_quant)
        return get_hash_for_files((__file__, *(str(room.__file__) for room in rooms)))


def _unbind_selects(graph: fx.Graph) -> None:
    """Replace all selects of one tensor along one dimension by one `unbind`, whose backward stacks the parts."""
    groups: dict[tuple[Any, Any], list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_method", target="select"):
        if len(node.args) == 3 and not node.kwargs and all(isinstance(place, int) for place in node.args[1:]):
            groups[node.args[:2]].append(node)
    for (source, dim), selects in groups.items():
        value = source.meta.get("example_value")
        size = value.shape[dim] if isinstance(value, Tensor) else None
        if {node.args[2] for node in selects} != set(range(len(selects))) or size != len(selects):
            continue
        if _is_written(source) or any(map(_is_written, selects)):
            continue
        with graph.inserting_before(selects[0]):
            whole = graph.call_method("unbind", (source, dim))
        whole.meta["example_value"] = tuple(node.meta.get("example_value") for node in selects)
        for node in selects:
            node.op, node.target, node.args = "call_function", operator.getitem, (whole, node.args[2])


def _fuse_activation(graph: fx.Graph, node: fx.Node) -> None:
    x, scale, zero_point, _, _, qmin, qmax, gradient, tag = node.args
    chain = _chain(x)
    if not chain or gradient not in ("ste", "lsq"):
        return
    function = chain[-1]
    name = name_of(function.target, function.args[1:], function.kwargs)
    if name is None or not _can_be_fused(function.all_input_nodes[0], [scale, zero_point]):
        return
    with graph.inserting_before(node):
        arguments = (function.all_input_nodes[0], scale, zero_point, qmin, qmax, gradient, name, tag)
        fused = graph.call_function(torch.ops.sparsebit.fake_quantize_activated.default, arguments)
    fused.meta = dict(node.meta)
    node.replace_all_uses_with(fused)
    for dead in (node, *chain):  # nothing else is removed: in-place writes have no readers, and must stay
        graph.erase_node(dead)


def _chain(node: Any) -> list[fx.Node]:
    """Dropouts with p = 0 and the function before them; empty if one of them has other readers."""
    chain: list[fx.Node] = []
    while isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1:
        chain.append(node)
        if node.target is not F.dropout or node.kwargs or len(node.args) < 2 or node.args[1] != 0.0:
            return chain
        node = node.args[0]
    return []


def _fuse_stack(graph: fx.Graph, whole: fx.Node) -> None:
    source, dim = whole.args[0], whole.args[1] if len(whole.args) == 2 else 0
    quantizers = _quantizers_of(whole)
    if quantizers is None or whole.kwargs or not isinstance(source, fx.Node) or not isinstance(dim, int):
        return
    scales, zero_points = ([node.args[place] for node in quantizers] for place in (1, 2))
    grids = {node.args[3:8] for node in quantizers}  # axis, group size, ends, gradient
    if len(grids) != 1 or not _can_be_fused(source, [*scales, *zero_points]):
        return
    ((_, _, qmin, qmax, gradient),) = grids
    if gradient not in ("ste", "lsq") or stack_form(source.meta["example_value"], dim) is None:
        return
    order = list(graph.nodes)
    with graph.inserting_before(max(quantizers, key=order.index)):
        tags = "\n".join(str(node.args[8]) for node in quantizers)
        arguments = (source, scales, zero_points, dim, qmin, qmax, gradient, tags)
        fused = graph.call_function(torch.ops.sparsebit.fake_quantize_stacked.default, arguments)
        fused.meta["example_value"] = [node.meta["example_value"] for node in quantizers]
        for place, node in enumerate(quantizers):
            part = graph.call_function(operator.getitem, (fused, place))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
    items = [node.args[0] for node in quantizers]
    for dead in (*quantizers, *items, whole):
        assert isinstance(dead, fx.Node)
        graph.erase_node(dead)


def _quantizers_of(whole: fx.Node) -> list[fx.Node] | None:
    """The quantizers that alone read the parts, in the order of the parts."""
    value = whole.meta.get("example_value")
    num_parts = len(value) if isinstance(value, tuple | list) else 0
    found: dict[int, fx.Node] = {}
    for item in whole.users:
        if item.target is not operator.getitem or len(item.users) != 1:
            return None
        (reader,) = item.users
        if reader.target is not OPERATOR or reader.args[0] is not item:
            return None
        found[int(item.args[1]) % num_parts] = reader  # type: ignore[arg-type]
    is_whole = len(found) == num_parts == len(whole.users)
    return [found[place] for place in range(num_parts)] if is_whole else None


def _can_be_fused(source: fx.Node, params: list[Any]) -> bool:
    values = [node.meta.get("example_value") for node in (source, *params)]
    if not all(isinstance(value, Tensor) for value in values):
        return False
    x, *numbers = values
    if any(number.numel() != 1 or number.device != x.device for number in numbers) or _is_written(source):
        return False
    return shows_kernels(x) and any(value.requires_grad for value in values)


def _is_written(node: fx.Node) -> bool:
    """Whether some reader may write into it: a fused op would read it later than before."""
    names = (str(getattr(user.target, "__name__", user.target)) for user in node.users)
    return any(name.endswith("_") and not name.endswith("__") for name in names)
