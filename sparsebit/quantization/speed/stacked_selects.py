"""Rewrites that replace the selects which take q, k and v from one tensor by one op; it can quantize them, too.

The backward of a select fills a tensor of the whole's size with zeros, and all of those are added up; that of `unbind`
stacks the parts. On a GPU, quantizers after all parts run as one kernel.
"""

from __future__ import annotations

import operator as python_operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from sparsebit.graph.nodes.aliasing import written_later
from sparsebit.graph.rewriting.patterns import only_reader
from sparsebit.numerics.fake_quant import operator
from sparsebit.numerics.fake_quant.gradients import LEARNING
from sparsebit.numerics.fake_quant.memory_layout import stack_form
from sparsebit.quantization.ops.quant_opr import QIdentity
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.speed.below_autograd import fuses
from sparsebit.quantization.speed.fusion_guards import may_fuse
from sparsebit.quantization.speed.saved_activations import note_quantized
from sparsebit.quantization.speed.stacked_fake_quant import Stack, fake_quantize_stacked
from sparsebit.quantization.speed.training_graph import Draft, FusedStep


def unstacked(x: Any, dim: int, indices: tuple[int, ...]) -> tuple[Any, ...]:
    """`x.select(dim, index)` for each of them."""
    if x.shape[dim] != len(indices):  # a few out of many are selected one by one
        return tuple(x.select(dim, index) for index in indices)
    whole = x.unbind(dim)
    return tuple(whole[index] for index in indices)


class StackedQuantizers(FusedStep):
    """`unstacked`, with each part passed to its reader: `QIdentity` modules."""

    def __init__(self, dim: int, indices: Sequence[int], readers: Sequence[QIdentity]) -> None:
        super().__init__("stacked_quantizers")
        self.dim, self.indices, self.readers = dim, tuple(indices), tuple(readers)

    def __call__(self, x: Any) -> tuple[Any, ...]:
        quantized = self._at_once(x)
        if quantized is not None:
            return quantized
        parts = unstacked(x, self.dim, self.indices)
        return tuple(reader(part) for reader, part in zip(self.readers, parts, strict=True))

    def _at_once(self, x: Any) -> tuple[Tensor, ...] | None:
        num_parts = len(self.indices)
        if not isinstance(x, Tensor) or not fuses(x) or x.shape[self.dim] != num_parts:
            return None
        place_of = {index: place for place, index in enumerate(self.indices)}
        if place_of.keys() != set(range(num_parts)) or stack_form(x, self.dim) is None:
            return None
        readers = [self.readers[place_of[index]] for index in range(num_parts)]  # in the order of the parts in memory
        quantizers = [reader.input_quantizer for reader in readers]
        if any(reader.notes_grid for reader in readers) or not _are_alike(quantizers):
            return None
        if not all(may_fuse(reader.input_quantizer, (reader,), x) for reader in readers):
            return None
        scales, zero_points = zip(*(quantizer.operands() for quantizer in quantizers), strict=True)
        numbers = (*scales, *zero_points)
        learned = quantizers[0].GRADIENT in LEARNING and any(number.requires_grad for number in numbers)
        are_single = all(number.numel() == 1 and number.device == x.device for number in numbers)
        if not are_single or not (x.requires_grad or learned):
            return None
        if any(operator.is_intercepted(x, *both) for both in zip(scales, zero_points, strict=True)):
            return None
        spec, tags = quantizers[0].spec, "\n".join(quantizer.name for quantizer in quantizers)
        stack = Stack(self.dim, spec.qmin, spec.qmax, quantizers[0].GRADIENT, tags)
        quantized = fake_quantize_stacked(x, stack, scales, zero_points)
        for index, quantizer in enumerate(quantizers):
            note_quantized(quantizer, x.select(self.dim, index), quantized[index])
        return tuple(quantized[index] for index in self.indices)


def _are_alike(quantizers: list[Quantizer]) -> bool:
    """Whether they have the same codes and the same gradient, and the kernels support it."""
    kinds = {(quantizer.spec.qmin, quantizer.spec.qmax, quantizer.GRADIENT) for quantizer in quantizers}
    return len(kinds) == 1 and quantizers[0].GRADIENT != "pact"


def stack_quantizers(draft: Draft) -> None:
    """Replace groups of selects that only quantizers read, together with the quantizers."""
    for group in _groups(draft):
        calls = [node for same in group.selects.values() for node in same]
        readers = [only_reader(node, draft.root) for node in calls]
        if len(calls) != len(group.selects) or not all(type(reader) is QIdentity for reader in readers):
            continue
        step: Any = StackedQuantizers(group.dim, tuple(group.selects), readers)  # type: ignore[arg-type]
        group.join(draft, step, (group.source,))
        for node in calls:
            (read,) = node.users
            read.replace_all_uses_with(node)
            draft.drop_unread(read)


def join_selects(draft: Draft) -> None:
    """Replace the other groups of selects."""
    for group in _groups(draft):
        group.join(draft, unstacked, (group.source, group.dim, tuple(group.selects)))


class _Group(NamedTuple):
    """The selects of one tensor along one dimension, by index."""

    source: fx.Node
    dim: int
    selects: dict[int, list[fx.Node]]

    def join(self, draft: Draft, function: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        """Insert `function(*args)` before them; its results replace those of the selects."""
        first = next(iter(self.selects.values()))[0]
        with draft.graph.inserting_before(first):
            whole = draft.graph.call_function(function, args)
        for place, same in enumerate(self.selects.values()):
            for node in same:
                node.op, node.target, node.args = "call_function", python_operator.getitem, (whole, place)
        return whole


def _groups(draft: Draft) -> list[_Group]:
    """Groups in which neither parts nor their readers are written in place, which torch forbids after `unbind`."""
    written = {draft.copies[node] for node in written_later(draft.root) if node in draft.copies}
    found: dict[tuple[fx.Node, int], dict[int, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
    for node in draft.graph.nodes:
        if node.op == "call_method" and node.target == "select" and len(node.args) == 3 and not node.kwargs:
            source, dim, index = node.args
            if isinstance(source, fx.Node) and isinstance(dim, int) and isinstance(index, int):
                found[source, dim][index].append(node)
    groups = [_Group(*key, dict(selects)) for key, selects in found.items() if len(selects) > 1]

    def touched(group: _Group) -> set[fx.Node]:
        calls = [node for same in group.selects.values() for node in same]
        return {*calls, *(reader for node in calls for reader in node.users)}

    return [group for group in groups if written.isdisjoint(touched(group))]
