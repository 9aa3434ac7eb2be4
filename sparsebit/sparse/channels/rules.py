"""How each ATen operator carries the labels of channels from its inputs to its outputs.

Few rules are written down (`layer_ops.py`, and reductions and look-ups here); operators that move values are run on
the labels (`moving_ops.py`). For all others it is *measured* whether an output slice depends on the same input slice
alone: values of some slices are changed, and the other slices must stay as they were. The channels of operators that
fit no rule are pinned, and therefore spared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsebit.graph.checking.outcome import seed_generators, undisturbed_randomness
from sparsebit.sparse.channels.labels import FREE, Axes, LabelSets, is_free
from sparsebit.sparse.channels.layer_ops import layer_rule
from sparsebit.sparse.channels.moving_ops import EXPANSIONS, JOINS, MOVES, joined, moved
from sparsebit.sparse.channels.op_call import Call, pin_all, shared, tensor_leaves

# Sums over channels: a removed channel counts as zero. The proof decides whether it was zero.
_SUMS = frozenset(("sum", "linalg_vector_norm", "norm"))
# They count channels, and zeros too: exact if zeros keep their places.
_MEANS = frozenset(("mean", "var", "std", "var_mean", "std_mean"))
_REDUCTIONS = frozenset((
    *_MEANS, "amax", "amin", "max", "min", "argmax", "argmin", "prod", "any",
    "all", "logsumexp", "median", "nansum",
))  # fmt: skip
# Element-wise, but not tagged so by torch.
_POINTWISE = frozenset((
    "hardswish", "hardswish_", "_prelu_kernel", "hardsigmoid", "mish", "log_sigmoid_forward", "masked_fill",
    "masked_fill_", "copy", "copy_", "hardtanh", "hardtanh_", "native_dropout", "bernoulli", "zeros_like",
    "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "leaky_relu", "elu", "celu", "selu", "softplus",
    "hardshrink", "softshrink", "threshold", "gelu", "silu", "relu6", "clamp_min", "clamp_max",
))  # fmt: skip
# They write values into an existing tensor.
_FILLS = frozenset(("fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_"))
# One value at every place: such a tensor could be created with any size.
_CONSTANTS = frozenset(("zeros", "ones", "full", "new_zeros", "new_ones", "new_full"))
_LOOKUPS = frozenset(("index", "_unsafe_index", "index_select", "gather"))


def carry(sets: LabelSets, call: Call) -> list[Axes]:
    """The labels of every output of a call; joins and pins what the operator ties together."""
    tensors, name = call.tensors(), call.name
    if name in _CONSTANTS:
        return [tuple(torch.full((size,), FREE) if size > 1 else None for size in x.shape) for x in call.outputs]
    is_labelled = any(labels is not None for tensor in tensors for labels in call.axes_of(tensor))
    if not is_labelled and name not in EXPANSIONS:
        return call.unlabelled()
    if name in _FILLS:
        return [call.axes_of(tensors[0]) for _ in call.outputs]
    if rule := layer_rule(name):
        return rule(sets, call)
    if name in JOINS:
        return joined(sets, call)
    if name in MOVES:
        return moved(sets, call)
    if name in _SUMS or name in _REDUCTIONS:
        return _reduced(sets, call)
    if name in _LOOKUPS:
        return _indexed(sets, call)
    return _gated(sets, call) if name == "glu" else _slicewise(sets, call)


def _gated(sets: LabelSets, call: Call) -> list[Axes]:
    """`glu`: one half of a dimension gates the other, place by place."""
    source = call.args[0]
    axes, dim = call.axes_of(source), call.argument("dim", -1) % source.dim()
    if (halves := axes[dim]) is not None:
        halves = shared(sets, list(halves.chunk(2)), halves.numel() // 2, call)
    return [(*axes[:dim], halves, *axes[dim + 1 :])]


def _slicewise(sets: LabelSets, call: Call) -> list[Axes]:
    """Element-wise operators with broadcasting, and all others for which a probe shows that slices stay apart."""
    inputs = call.tensors()
    rank = max((output.dim() for output in call.outputs), default=0)
    # Which operators have the tag depends on the version of torch.
    is_pointwise = torch.Tag.pointwise in call.op.tags or bool({call.name, call.name.removesuffix("_")} & _POINTWISE)
    if not call.outputs or (not is_pointwise and any(output.dim() != rank for output in call.outputs)):
        return pin_all(sets, call, f"{call.described()} mixes them")
    results: list[list[Tensor | None]] = [[None] * output.dim() for output in call.outputs]
    is_used: set[tuple[int, int]] = set()
    for place, output in enumerate(call.outputs):
        for dim in range(output.dim()):
            taking = _aligned(call, inputs, output, dim)
            if not is_pointwise:
                taking = [(number, axis) for number, axis in taking if inputs[number].dim() == output.dim()]
            found = [call.axes_of(inputs[number])[axis] for number, axis in taking]
            if call.name.endswith("_") and taking and taking[0][0] == 0 and is_free(found[0]):
                found[0] = None  # values written into a constant have its size
            if all(labels is None for labels in found):
                continue
            if not is_pointwise and not stays_apart(call, [inputs[number] for number, _ in taking], place, dim):
                continue
            is_used.update(taking)
            results[place][dim] = shared(sets, found, output.shape[dim], call)
    for number, tensor in enumerate(inputs):
        for axis, labels in enumerate(call.axes_of(tensor)):
            if labels is not None and (number, axis) not in is_used:
                sets.pin(labels, f"{call.described()} mixes them")
    return [tuple(entry) for entry in results]


def _aligned(call: Call, inputs: list[Tensor], output: Tensor, dim: int) -> list[tuple[int, int]]:
    """The inputs that have the same size in this dimension of an output, by their numbers, and their dimensions."""
    size, back = output.shape[dim], output.dim() - dim
    found = [(number, tensor.dim() - back) for number, tensor in enumerate(inputs) if tensor.dim() >= back]
    return [
        (number, axis)
        for number, axis in found
        if inputs[number].shape[axis] == size and (size > 1 or call.axes_of(inputs[number])[axis] is not None)
    ]


def stays_apart(call: Call, sliced: list[Tensor], place: int, dim: int) -> bool:
    """Whether each slice of an output depends on the same slice of these inputs alone, as far as two probes see."""
    output = call.outputs[place]
    order = torch.randperm(output.shape[dim])
    half = max(1, len(order) // 2)
    # An operator that works in place is not probed: it would write into the values of the run that is watched.
    if not any(tensor.is_floating_point() for tensor in sliced) or call.name.endswith("_"):
        return False

    def result(arguments: tuple[tuple[Any, ...], dict[str, Any]], kept: Tensor) -> Tensor:
        # Both runs draw the same random numbers. NaN differs from itself, so it is replaced.
        seed_generators(0)
        found = tensor_leaves(call.op(*arguments[0], **arguments[1]))[place]
        return found.index_select(dim, kept).nan_to_num()

    for written, kept in ((order[:half], order[half:]), (order[half:], order[:half])):
        changed = {id(x): _changed(x, x.dim() - output.dim() + dim, written) for x in sliced}
        given = call.args, call.kwargs
        other = pytree.tree_map(lambda leaf, changed=changed: changed.get(id(leaf), leaf), given)
        try:
            with undisturbed_randomness():
                if not torch.equal(result(given, kept), result(other, kept)):
                    return False
        except (RuntimeError, IndexError):
            return False
    return True


def _changed(tensor: Tensor, dim: int, places: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    changed = tensor.detach().clone()
    noise = torch.rand_like(changed.index_select(dim, places))
    return changed.index_copy(dim, places, changed.index_select(dim, places) + noise + 0.5)


def _reduced(sets: LabelSets, call: Call) -> list[Axes]:
    source = call.args[0]
    if len(call.tensors()) > 1:  # torch.max(a, b)
        return _slicewise(sets, call)
    axes, dims = call.axes_of(source), call.argument("dim")
    keeps = bool(call.argument("keepdim", False))
    dims = [dims] if isinstance(dims, int) else dims or range(source.dim())
    gone = {dim % max(1, source.dim()) for dim in dims}
    for dim in gone:
        if call.name not in _SUMS and source.dim():
            # Done only if something uses the result: a mean that the code merely logs must not spare channels.
            act = sets.keep_width if call.name in _MEANS else sets.pin
            call.when_used.append((act, axes[dim], f"{call.described()} is taken over them"))
    kept = tuple(None if dim in gone else labels for dim, labels in enumerate(axes) if keeps or dim not in gone)
    return [kept if output.dim() == len(kept) else (None,) * output.dim() for output in call.outputs]


def _indexed(sets: LabelSets, call: Call) -> list[Axes]:
    """Look-ups by tensors of indices: the dimension that they are taken from keeps its size."""
    source = call.args[0]
    axes = call.axes_of(source)
    reason = f"{call.described()} looks them up"
    if call.name in ("index_select", "gather"):
        dim = call.args[1] % source.dim()
        sets.pin(axes[dim], reason)
        if call.name == "gather":
            return pin_all(sets, call, reason)
        return [(*axes[:dim], None, *axes[dim + 1 :])]
    indices = list(call.args[1]) + [None] * (source.dim() - len(call.args[1]))
    is_masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
    used = [dim for dim, index in enumerate(indices) if index is not None]
    if is_masked or used != list(range(used[0], used[0] + len(used))):
        return pin_all(sets, call, reason)
    for dim in used:
        sets.pin(axes[dim], reason)
    width = max(index.dim() for index in indices if index is not None)
    return [(*axes[: used[0]], *(None,) * width, *axes[used[-1] + 1 :])]
