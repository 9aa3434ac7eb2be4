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

from sparsebit.sparse.channels.labels import FREE, Axes, LabelSets, is_free
from sparsebit.sparse.channels.layer_ops import layer_rule
from sparsebit.sparse.channels.moving_ops import is_expansion, is_join, is_move, joined, moved
from sparsebit.sparse.channels.op_call import Call, pin_all, shared

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
    tensors = call.tensors()
    if call.name in _CONSTANTS:
        return [tuple(torch.full((size,), FREE) if size > 1 else None for size in x.shape) for x in call.outputs]
    is_labelled = any(labels is not None for tensor in tensors for labels in call.axes_of(tensor))
    if not is_labelled and not is_expansion(call.name):
        return [(None,) * output.dim() for output in call.outputs]
    name = call.name
    if name in _FILLS:
        return [call.axes_of(tensors[0]) for _ in call.outputs]
    if rule := layer_rule(name):
        return rule(sets, call)
    if is_join(name):
        return joined(sets, call)
    if is_move(name):
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
    halves = axes[dim]
    if halves is not None:
        first, second = halves.chunk(2)
        halves = shared(sets, [first, second], first.numel(), call)
    return [tuple(halves if place == dim else labels for place, labels in enumerate(axes))]


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
            size, back = output.shape[dim], output.dim() - dim
            taking = [
                (number, tensor.dim() - back)
                for number, tensor in enumerate(inputs)
                if tensor.dim() >= back
                and tensor.shape[tensor.dim() - back] == size
                and (size > 1 or call.axes_of(tensor)[tensor.dim() - back] is not None)
                and (is_pointwise or tensor.dim() == output.dim())
            ]
            found = [call.axes_of(inputs[number])[axis] for number, axis in taking]
            if call.name.endswith("_") and taking and taking[0][0] == 0 and is_free(found[0]):
                found[0] = None  # values written into a constant have its size
            if all(labels is None for labels in found):
                continue
            if not is_pointwise and not stays_apart(call, [inputs[number] for number, _ in taking], place, dim):
                continue
            is_used.update(taking)
            results[place][dim] = shared(sets, found, size, call)
    for number, tensor in enumerate(inputs):
        for axis, labels in enumerate(call.axes_of(tensor)):
            if labels is not None and (number, axis) not in is_used:
                sets.pin(labels, f"{call.described()} mixes them")
    return [tuple(entry) for entry in results]


def stays_apart(call: Call, sliced: list[Tensor], place: int, dim: int) -> bool:
    """Whether each slice of an output depends on the same slice of these inputs alone, as far as two probes see."""
    size = call.outputs[place].shape[dim]
    chosen = torch.randperm(size)[: max(1, size // 2)]
    halves = [chosen, torch.tensor([i for i in range(size) if i not in set(chosen.tolist())], dtype=torch.long)]
    if not any(tensor.is_floating_point() for tensor in sliced) or call.name.endswith("_"):
        return False
    for half in halves:
        changed = {
            id(tensor): _changed(tensor, tensor.dim() - call.outputs[place].dim() + dim, half) for tensor in sliced
        }
        args, kwargs = _replaced(call, changed)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                before = _outputs_of(call.op(*call.args, **call.kwargs))[place]
                torch.manual_seed(0)
                after = _outputs_of(call.op(*args, **kwargs))[place]
        except (RuntimeError, IndexError):
            return False
        others = torch.ones(size, dtype=torch.bool)
        others[half] = False
        kept = others.nonzero().flatten()
        if not torch.equal(before.index_select(dim, kept).nan_to_num(), after.index_select(dim, kept).nan_to_num()):
            return False
    return True


def _replaced(call: Call, changed: dict[int, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with some tensors, by id, replaced."""
    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
        lambda leaf: changed.get(id(leaf), leaf), (call.args, call.kwargs)
    )
    return found


def _changed(tensor: Tensor, dim: int, places: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    changed = tensor.detach().clone()
    noise = torch.rand_like(changed.index_select(dim, places))
    return changed.index_copy(dim, places, changed.index_select(dim, places) + noise + 0.5)


def _outputs_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _reduced(sets: LabelSets, call: Call) -> list[Axes]:
    source = call.args[0]
    axes = call.axes_of(source)
    dims = call.argument("dim")
    keeps = bool(call.argument("keepdim", False))
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        gone = set(range(source.dim()))
    else:
        gone = {dim % max(1, source.dim()) for dim in ([dims] if isinstance(dims, int) else dims)}
    if any(isinstance(argument, Tensor) for argument in call.args[1:]):  # torch.max(a, b)
        return _slicewise(sets, call)
    for dim in gone:
        if call.name not in _SUMS and source.dim():
            note = call.keep_width_when_used if call.name in _MEANS else call.pin_when_used
            note(axes[dim], f"{call.described()} is taken over them")
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
        return [tuple(None if i == dim else labels for i, labels in enumerate(axes))]
    indices = list(call.args[1]) + [None] * (source.dim() - len(call.args[1]))
    is_masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
    used = [dim for dim, index in enumerate(indices) if index is not None]
    if is_masked or used != list(range(used[0], used[0] + len(used))):
        return pin_all(sets, call, reason)
    for dim in used:
        sets.pin(axes[dim], reason)
    width = max(index.dim() for index in indices if index is not None)
    return [(*axes[: used[0]], *(None,) * width, *axes[used[-1] + 1 :])]
