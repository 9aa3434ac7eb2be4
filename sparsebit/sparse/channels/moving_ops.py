"""Operators that only move values: they are run on the labels themselves, which yields their index map.

Chains of views, permutations, slices, paddings and concatenations therefore need no rules of their own. The hard part
is a view that splits or merges dimensions: afterwards one label may vary along several dimensions, and `_projected`
chooses one of them to be the channel dimension; the search can try another (`Call.choose`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsebit.sparse.channels.labels import FIXED, FREE, Axes, LabelSets, is_free
from sparsebit.sparse.channels.op_call import Call, or_fixed, shared, tensor_leaves

# Operators whose output values are input values (or zeros) at other places. How many of them run can depend on strides.
MOVES = frozenset((
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "slice", "select", "unsqueeze", "squeeze",
    "expand", "split", "split_with_sizes", "chunk", "unbind", "clone", "contiguous", "_to_copy", "alias", "detach",
    "detach_", "lift_fresh", "lift_fresh_copy", "repeat", "roll", "flip", "constant_pad_nd", "pixel_shuffle",
    "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "unfold", "im2col", "reflection_pad1d",
    "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
    "_reshape_alias", "view_copy", "narrow", "diagonal", "split_copy", "unbind_copy", "slice_copy", "permute_copy",
    "unsqueeze_copy", "_conj", "movedim", "repeat_interleave", "rot90", "t_copy", "transpose_copy", "expand_copy",
    "select_copy", "squeeze_copy", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "transpose_", "t_",
))  # fmt: skip
_VIEWS = frozenset(("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy"))
_SPLITS = frozenset((
    "split", "split_with_sizes", "chunk", "split_copy", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk",
))  # fmt: skip
_COPIES = frozenset(("_to_copy", "clone", "contiguous", "lift_fresh", "lift_fresh_copy", "alias", "detach", "detach_"))
JOINS = frozenset(("cat", "concat", "concatenate", "stack", "_cat"))
EXPANSIONS = frozenset(("expand", "expand_copy"))  # along dimensions that then could have any size


def moved(sets: LabelSets, call: Call) -> list[Axes]:
    """Run the operator on the labels of each dimension of its input."""
    source = call.tensors()[0]
    axes, name = call.axes_of(source), call.name
    if name in ("transpose_", "t_"):  # the tensor has its new shape already, and its labels are in the old order
        one, other = (dim % source.dim() for dim in (call.args[1:] if name == "transpose_" else (0, -1)))
        order = list(axes)
        order[one], order[other] = order[other], order[one]
        return [tuple(order)]
    if name in EXPANSIONS:
        return [_expanded(axes, source, call.outputs[0])]
    found: list[list[Tensor | None]] = [[None] * output.dim() for output in call.outputs]
    for dim, labels in enumerate(axes):
        if labels is None:
            continue
        if is_free(labels):
            _move_free(call, source, dim, found)
            continue
        if name in _SPLITS:
            _tie_parts(sets, call, labels, source, dim)
        try:
            state = sets.num_unions
            results = _run_on_labels(call, source, sets.roots(labels), dim)
        except (RuntimeError, NotImplementedError, IndexError):
            sets.pin(labels, f"{call.described()}: its index map is not known")
            continue
        for place, result in enumerate(results):
            # Projecting an earlier output may have joined sets; the labels of this one are then no longer
            # representatives.
            if sets.num_unions != state:
                result = sets.roots(result)
            for target, moved in _projected(sets, call, result).items():
                other = found[place][target]
                if other is not None and not is_free(other):
                    sets.pin(moved, f"{call.described()}: two kinds of channels end up in one dimension")
                else:
                    found[place][target] = moved
    return [tuple(entry) for entry in found]


def _move_free(call: Call, source: Tensor, dim: int, found: list[list[Tensor | None]]) -> None:
    """The dimensions into which a dimension of any size goes could have any size too."""
    try:
        results = _run_on_labels(call, source, torch.arange(source.shape[dim]), dim)
    except (RuntimeError, NotImplementedError, IndexError):
        return
    for place, result in enumerate(results):
        for target, size in enumerate(result.shape):
            if found[place][target] is None and not _is_constant(result, target):
                found[place][target] = torch.full((size,), FREE)


def joined(sets: LabelSets, call: Call) -> list[Axes]:
    """`cat` and `stack`: along the new order of one dimension; every other dimension is shared by all parts."""
    # Empty parts (a prefix of no tokens) tie no labels.
    parts = [tensor for tensor in call.args[0] if tensor.numel()] or list(call.args[0])
    output = call.outputs[0]
    along = call.argument("dim", 0) % output.dim()
    is_stack = call.name == "stack"
    axes = [call.axes_of(part) for part in parts]
    result: list[Tensor | None] = []
    for dim in range(output.dim()):
        old = dim - 1 if is_stack and dim > along else dim
        if dim != along:
            result.append(shared(sets, [entry[old] for entry in axes], output.shape[dim], call))
        elif is_stack or all(entry[dim] is None for entry in axes):
            result.append(None)
        else:
            pieces = [or_fixed(entry[dim], part.shape[dim]) for part, entry in zip(parts, axes, strict=True)]
            result.append(torch.cat(pieces).clamp(min=FIXED))
    return [tuple(result)]


def _expanded(axes: Axes, source: Tensor, output: Tensor) -> Axes:
    """A dimension that was broadcast exists at any size."""
    lead = output.dim() - source.dim()
    old = [(1, None)] * lead + list(zip(source.shape, axes, strict=True))
    return tuple(
        torch.full((size,), FREE) if dim < lead or (before == 1 and size != 1) else labels
        for dim, (size, (before, labels)) in enumerate(zip(output.shape, old, strict=True))
    )


def _tie_parts(sets: LabelSets, call: Call, labels: Tensor, source: Tensor, dim: int) -> None:
    """Equal parts of a split stay equal in size if the same place is removed from each: one of two options."""
    along = call.argument("dim", 0) % source.dim()
    sizes = {output.shape[dim] for output in call.outputs}
    if along == dim and len(sizes) == 1 and len(call.outputs) > 1 and call.choose("split", 2, labels):
        sets.join_rows(labels.view(len(call.outputs), -1).t(), f"{call.described()} splits them into equal parts")


def _run_on_labels(call: Call, source: Tensor, labels: Tensor, dim: int) -> list[Tensor]:
    if call.name == "constant_pad_nd":
        # What is padded along other dimensions belongs to every channel, however many there are.
        pads, back = list(call.args[1]), 2 * (source.dim() - 1 - dim)
        own = F.pad(labels, pads[back : back + 2], value=FIXED) if back < len(pads) else labels
        return [_spread(own, call.outputs[0].shape, dim)]
    spread = _spread(labels, source.shape, dim)
    if call.name in _VIEWS:
        return [spread.reshape(call.outputs[0].shape)]
    if call.name in _COPIES:
        return [spread]
    if call.name in ("channel_shuffle", "native_channel_shuffle"):
        return [spread.unflatten(1, (call.argument("groups"), -1)).transpose(1, 2).flatten(1, 2)]

    def run_on(values: Tensor) -> list[Tensor]:
        args, kwargs = pytree.tree_map(lambda leaf: values if leaf is source else leaf, (call.args, call.kwargs))
        return tensor_leaves(call.op(*args, **kwargs))

    try:
        return run_on(spread)
    except (RuntimeError, NotImplementedError):  # some operators have no kernel for integers
        return [x.round().long() for x in run_on(spread.double())]


def _spread(labels: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """The labels of one dimension for every element of a tensor, without memory for the others."""
    view = [1] * len(shape)
    view[dim] = -1
    return labels.view(view).expand(tuple(shape))


def _projected(sets: LabelSets, call: Call, elements: Tensor) -> dict[int, Tensor]:
    """Labels (representatives) of elements as those of one dimension; where they vary along more, they are joined."""
    # Along an expanded dimension (`_spread`) every position is the same element, so one of them is enough.
    for dim in range(elements.dim()):
        if elements.stride(dim) == 0 and elements.shape[dim] > 1:
            elements = elements.narrow(dim, 0, 1)
    varying = [dim for dim in range(elements.dim()) if not _is_constant(elements, dim)]
    if not varying:
        # One label in every position: the channel was selected, and has no dimension of its own any more.
        sets.pin(elements, f"{call.described()} takes single channels out")
        return {}
    chosen = varying[0]
    if len(varying) > 1:
        # The first option is the dimension of heads: before that inside a head, after q, k, v of a joint product.
        first = varying[0] if len(varying) == 2 else varying[-2]
        order = [first, *(dim for dim in varying if dim != first)]
        chosen = order[call.choose("view", len(order), elements)]
    rows = elements.movedim(chosen, 0).reshape(elements.shape[chosen], -1)
    reason = f"{call.described()} arranges them in several dimensions"
    labels = rows[:, 0].clone()
    if rows.shape[1] > 1:
        sets.join_rows(_distinct_columns(rows), reason)
        is_real = rows > FIXED
        labels = torch.where(is_real.any(1), rows.amax(1), labels)
    return {chosen: labels}


def _distinct_columns(rows: Tensor) -> Tensor:
    """The columns without repetitions, found by a random projection: `unique(dim=1)` is slow."""
    weights = torch.rand(rows.shape[0], 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, inverse = (rows * weights).sum(0).unique(return_inverse=True)
    first = torch.zeros(found.numel(), dtype=torch.long).scatter_(0, inverse, torch.arange(rows.shape[1]))
    return rows[:, first]


def _is_constant(elements: Tensor, dim: int) -> bool:
    return elements.shape[dim] <= 1 or bool((elements == elements.narrow(dim, 0, 1)).all())
