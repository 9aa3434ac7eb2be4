"""Channel rules for operators of layers: products with weights, convolutions, normalizations, embeddings.

A rule takes one `Call` and returns the labels of its outputs. To the labels of its inputs it does one of three things:
- positions that are multiplied and summed are joined (`_contracted`): removed from one factor, they must be removed
  from the other;
- positions that are looked up or slid over are pinned;
- positions that mean and variance are taken over keep their width (`keep_width`), because a norm counts them.

`rules.carry` finds a rule by the operator's name.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsebit.sparse.channels.labels import Axes, LabelSets
from sparsebit.sparse.channels.op_call import Call, or_fixed, pin_all, shared


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
    batch = zip(one[:-2], other[:-2], first.shape, strict=False)
    result = [shared(sets, [a, b], size, call) for a, b, size in batch]
    result += [*([one[-2]] if first.dim() > 1 else []), *([other[-1]] if second.dim() > 1 else [])]
    if added is not None:
        for back, labels in enumerate(reversed(call.axes_of(added)), 1):
            if added.shape[-back] == call.outputs[0].shape[-back] and added.shape[-back] > 1:
                result[-back] = shared(sets, [result[-back], labels], added.shape[-back], call)
            else:
                sets.pin(labels, f"{call.described()} broadcasts them")
    return [tuple(result)]


def _convolution(sets: LabelSets, call: Call) -> list[Axes]:
    source, weight, bias = call.args[0], call.args[1], call.argument("bias")
    is_transposed, groups = bool(call.argument("transposed", False)), int(call.argument("groups", 1))
    axes, kernel = call.axes_of(source), call.axes_of(weight)
    for labels in (*axes[2:], *kernel[2:]):
        sets.pin(labels, f"{call.described()} slides over them")
    if groups == 1:
        inner, given = kernel[:2] if is_transposed else (kernel[1], kernel[0])
        _contracted(sets, axes[1], inner, source.shape[1], call)
    else:
        # The rows are those of the inputs when transposed, else of the outputs.
        rows, columns = (or_fixed(labels, size) for labels, size in zip(kernel[:2], weight.shape, strict=False))
        given = _grouped(sets, call, or_fixed(axes[1], source.shape[1]), rows, columns, groups, is_transposed)
    if bias is not None:
        given = shared(sets, [given, call.axes_of(bias)[0]], call.outputs[0].shape[1], call)
    return [(axes[0], given, *(None,) * (source.dim() - 2))]


def _grouped(
    sets: LabelSets, call: Call, taken: Tensor, rows: Tensor, columns: Tensor, groups: int, is_transposed: bool
) -> Tensor | None:
    """A grouped convolution loses whole groups, or the same places of every group."""
    reason = f"{call.described()} has {groups} groups"
    num_taken = taken.numel() // groups
    # Option 0: whole groups, if there are at least as many groups as channels in each; else the same places of all.
    if num_taken == 1 or call.choose("group", 2, taken) == int(num_taken > groups):
        sets.pin(columns, f"{reason}, and only whole groups can be removed")
        sets.join_rows(torch.cat([taken.view(groups, -1), rows.view(groups, -1)], 1), reason)
        call.groups.append(rows.view(groups, -1)[:, 0])
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
    if first is not None or second is not None:
        reason = f"{call.described()} sums over values that must stay"
        sets.join_pairwise(or_fixed(first, size), or_fixed(second, size), reason)


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
    table, wide = call.axes_of(call.args[0])
    sets.pin(table, f"{call.described()} looks them up")
    return [(*(None,) * call.args[1].dim(), wide)]


def _batch_normalized(sets: LabelSets, call: Call) -> list[Axes]:
    source = call.args[0]
    axes, channel = _normalized_channel(sets, call, f"{call.described()} normalizes over them")
    given = {source.shape: (axes[0], channel, *(None,) * (source.dim() - 2)), source.shape[1:2]: (channel,)}
    return [given.get(output.shape, (None,) * output.dim()) for output in call.outputs]


def _normalized_channel(sets: LabelSets, call: Call, reason: str) -> tuple[Axes, Tensor | None]:
    """The axes of the input, and the channel that it shares with scales, shifts and statistics."""
    source = call.args[0]
    axes = call.axes_of(source)
    for labels in axes[2:]:
        sets.pin(labels, reason)
    vectors = [tensor for tensor in call.tensors()[1:] if tensor.shape == source.shape[1:2]]
    found = [axes[1], *(call.axes_of(vector)[0] for vector in vectors)]
    return axes, shared(sets, found, source.shape[1], call)


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
    return [
        (*axes[:lead], *(last if output.shape == source.shape else (None,) * (output.dim() - lead)))
        if output.dim() >= lead
        else (None,) * output.dim()
        for output in call.outputs
    ]


def _group_normalized(sets: LabelSets, call: Call) -> list[Axes]:
    source, groups = call.args[0], int(call.argument("group"))
    reason = f"{call.described()} normalizes over each of its {groups} groups"
    axes, channel = _normalized_channel(sets, call, reason)
    of_groups = None
    if channel is not None:
        sets.join_rows(channel.view(groups, -1), reason)
        of_groups = channel.view(groups, -1)[:, 0].clone()
        call.groups.append(of_groups)
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
