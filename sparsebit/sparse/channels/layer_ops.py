"""Operators of layers: products with weights, convolutions, normalizations, embeddings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsebit.sparse.channels.labels import FIXED, Axes, LabelSets
from sparsebit.sparse.channels.op_call import Call, pin_all, shared


def layer_rule(name: str) -> Callable[[LabelSets, Call], list[Axes]] | None:
    """The rule of an operator, if it belongs to a layer."""
    return _batch_normalized if "batch_norm" in name else _RULES.get(name)


def _matmul(sets: LabelSets, call: Call) -> list[Axes]:
    """`mm`, `addmm`, `bmm`, `baddbmm`, `mv`, `dot`: (batch..., n, k) times (batch..., k, m)."""
    operands = call.tensors()
    added = operands.pop(0) if call.name.startswith(("addmm", "baddbmm", "addmv")) else None
    first, second = operands[:2]
    one, other = call.axes_of(first), call.axes_of(second)
    _contracted(sets, one[-1], other[-2 if second.dim() > 1 else 0], first.shape[-1], call)
    result: list[Tensor | None] = [
        shared(sets, [a, b], first.shape[dim], call)
        for dim, (a, b) in enumerate(zip(one[:-2], other[:-2], strict=False))
    ]
    if first.dim() > 1:
        result.append(one[-2])
    if second.dim() > 1:
        result.append(other[-1])
    if added is not None:
        for back, labels in enumerate(reversed(call.axes_of(added)), 1):
            if added.shape[-back] == call.outputs[0].shape[-back] and added.shape[-back] > 1:
                result[-back] = shared(sets, [result[-back], labels], added.shape[-back], call)
            else:
                sets.pin(labels, f"{call.described()} broadcasts them")
    return [tuple(result)]


def _convolution(sets: LabelSets, call: Call) -> list[Axes]:
    source, weight = call.args[0], call.args[1]
    bias = call.argument("bias")
    is_transposed, groups = bool(call.argument("transposed", False)), int(call.argument("groups", 1))
    axes, kernel = call.axes_of(source), call.axes_of(weight)
    for labels in (*axes[2:], *kernel[2:]):
        sets.pin(labels, f"{call.described()} slides over them")
    batch, taken = axes[0], axes[1]
    num_in, num_out = source.shape[1], call.outputs[0].shape[1]
    inner, outer = (kernel[0], kernel[1]) if is_transposed else (kernel[1], kernel[0])
    if groups == 1:
        _contracted(sets, taken, inner, num_in, call)
        given = outer
    else:
        taken = torch.full((num_in,), FIXED) if taken is None else taken
        fixed = torch.full((weight.shape[0],), FIXED)
        rows = fixed if kernel[0] is None else kernel[0]  # of the inputs when transposed, else of the outputs
        columns = torch.full((weight.shape[1],), FIXED) if kernel[1] is None else kernel[1]
        given = _grouped(sets, call, taken, rows, columns, groups, is_transposed)
    if isinstance(bias, Tensor):
        given = shared(sets, [given, call.axes_of(bias)[0]], num_out, call)
    return [(batch, given, *(None,) * (source.dim() - 2))]


def _grouped(
    sets: LabelSets, call: Call, taken: Tensor, rows: Tensor, columns: Tensor, groups: int, is_transposed: bool
) -> Tensor | None:
    """A grouped convolution loses whole groups, or the same places of every group."""
    reason = f"{call.described()} has {groups} groups"
    num_taken = taken.numel() // groups
    prefers_places = num_taken > groups
    whole_groups = call.choose("group", 2, taken) == int(prefers_places) if num_taken > 1 else True
    if whole_groups:
        sets.pin(columns, f"{reason} of which each is whole")
        sets.join_rows(torch.cat([taken.view(groups, -1), rows.view(groups, -1)], 1), reason)
        call.note_groups(rows.view(groups, -1)[:, 0])
        if not is_transposed:
            return rows
        return taken.view(groups, -1)[:, 0].repeat_interleave(call.outputs[0].shape[1] // groups)
    if is_transposed:
        sets.join_pairwise(taken, rows, reason)
        sets.join_rows(rows.view(groups, -1).t(), reason)
        return columns.repeat(groups)
    sets.join_pairwise(taken, columns.repeat(groups), reason)
    sets.join_rows(rows.view(groups, -1).t(), reason)
    return rows


def _contracted(sets: LabelSets, first: Tensor | None, second: Tensor | None, size: int, call: Call) -> None:
    """A sum of products: positions removed from one factor must be removed from the other too."""
    if first is None and second is None:
        return
    reason = f"{call.described()} sums over values that must stay"
    one = torch.full((size,), FIXED) if first is None else first
    other = torch.full((size,), FIXED) if second is None else second
    sets.join_pairwise(one, other, reason)


def _bilinear(sets: LabelSets, call: Call) -> list[Axes]:
    """`nn.Bilinear`: (n, a) and (n, b) with a weight of (out, a, b); other uses of the operator pin their channels."""
    first, weight, second = call.args[:3]
    if [list(dims) for dims in call.args[3:7]] != [[1, 3], [0], [1, 2], [2, 3]]:
        return pin_all(sets, call, f"{call.described()} mixes them")
    one, kernel, other = (call.axes_of(tensor) for tensor in (first, weight, second))
    _contracted(sets, one[1], kernel[1], weight.shape[1], call)
    _contracted(sets, other[1], kernel[2], weight.shape[2], call)
    return [(shared(sets, [one[0], other[0]], first.shape[0], call), kernel[0])]


def _embedding(sets: LabelSets, call: Call) -> list[Axes]:
    weight, indices = call.args[0], call.args[1]
    table, wide = call.axes_of(weight)
    sets.pin(table, f"{call.described()} looks them up")
    return [(*(None,) * indices.dim(), wide)]


def _batch_normalized(sets: LabelSets, call: Call) -> list[Axes]:
    source = call.args[0]
    vectors = [tensor for tensor in call.tensors()[1:] if tensor.dim() == 1 and tensor.shape[0] == source.shape[1]]
    axes = call.axes_of(source)
    found = [axes[1], *(call.axes_of(vector)[0] for vector in vectors)]
    for labels in axes[2:]:
        sets.pin(labels, f"{call.described()} normalizes over them")
    channel = shared(sets, found, source.shape[1], call)
    return [
        (axes[0], channel, *(None,) * (source.dim() - 2))
        if output.shape == source.shape
        else ((channel,) if output.dim() == 1 and output.shape[0] == source.shape[1] else (None,) * output.dim())
        for output in call.outputs
    ]


def _normalized(sets: LabelSets, call: Call) -> list[Axes]:
    """Mean and variance over channels depend on how many there are: zeros must stay in their places."""
    source, num_last = call.args[0], len(call.args[1])
    axes, lead = call.axes_of(source), source.dim() - num_last
    vectors = [tensor for tensor in call.tensors()[1:] if tensor.dim() == num_last]
    last: list[Tensor | None] = []
    for dim in range(num_last):
        found = [axes[lead + dim], *(call.axes_of(vector)[dim] for vector in vectors)]
        for labels in found:
            sets.keep_width(labels, f"{call.described()} normalizes over them")
        last.append(shared(sets, found, source.shape[lead + dim], call))
    first = axes[:lead]
    return [
        (*first, *(last if output.shape == source.shape else (None,) * (output.dim() - lead)))
        if output.dim() >= lead
        else (None,) * output.dim()
        for output in call.outputs
    ]


def _group_normalized(sets: LabelSets, call: Call) -> list[Axes]:
    source, groups = call.args[0], int(call.argument("group"))
    axes = call.axes_of(source)
    vectors = [tensor for tensor in call.tensors()[1:] if tensor.dim() == 1]
    reason = f"{call.described()} normalizes over each of its {groups} groups"
    channel = shared(sets, [axes[1], *(call.axes_of(vector)[0] for vector in vectors)], source.shape[1], call)
    for labels in axes[2:]:
        sets.pin(labels, reason)
    if channel is not None:
        sets.join_rows(channel.view(groups, -1), reason)
    of_groups = None if channel is None else channel.view(groups, -1)[:, 0].clone()
    if of_groups is not None:
        call.note_groups(of_groups)
    return [
        (axes[0], channel, *(None,) * (source.dim() - 2)) if output.shape == source.shape else (axes[0], of_groups)
        for output in call.outputs
    ]


_RULES: dict[str, Callable[[LabelSets, Call], list[Axes]]] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"), _matmul),
    **dict.fromkeys(("convolution", "_convolution", "convolution_overrideable"), _convolution),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "layer_norm", "rms_norm"), _normalized),
    "_trilinear": _bilinear,
    "embedding": _embedding,
    "native_group_norm": _group_normalized,
}
