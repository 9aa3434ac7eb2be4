"""One operator call, as the channel rules see it, and operations on labels that several rules share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsebit.sparse.channels.labels import FIXED, FREE, Axes, LabelSets


@dataclass(frozen=True)
class Call:
    """One operator call of a run: its inputs, its outputs, and its place in the model."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    where: str
    axes_of: Callable[[Any], Axes]
    # (kind, number of options, labels) -> the option to take; asked wherever labels can be carried in several ways.
    choose: Callable[[str, int, Tensor], int]
    # Takes sizes that are not a dimension of a tensor: the labels of the groups of a convolution.
    note_groups: Callable[[Tensor], None]
    # (labels, reason): they must stay if anything uses the result of the call.
    pin_when_used: Callable[[Tensor | None, str], None]
    # (labels, reason): they must keep their places in activations if anything uses the result of the call.
    keep_width_when_used: Callable[[Tensor | None, str], None]

    @property
    def name(self) -> str:
        return str(self.op._schema.name).removeprefix("aten::")

    def described(self) -> str:
        return f"{self.name} in {self.where or 'the model'}"

    def argument(self, name: str, default: Any = None) -> Any:
        for index, declared in enumerate(self.op._schema.arguments):
            if declared.name == name:
                return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)
        return default

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


def pin_all(sets: LabelSets, call: Call, reason: str) -> list[Axes]:
    for tensor in call.tensors():
        for labels in call.axes_of(tensor):
            sets.pin(labels, reason)
    return [(None,) * output.dim() for output in call.outputs]


def shared(sets: LabelSets, found: list[Tensor | None], size: int, call: Call) -> Tensor | None:
    """One dimension that several tensors have in common: position by position, their labels are removed together."""
    if all(labels is None for labels in found):
        return None
    reason = f"{call.described()} combines them with values that must stay"
    full = [torch.full((size,), FIXED) if labels is None else labels for labels in found]
    for labels in full[1:]:
        sets.join_pairwise(full[0], labels, reason)
    stacked = torch.stack(full)
    if bool((stacked == FREE).all()):
        return full[0]
    return stacked.amax(0) if bool((stacked > FIXED).any()) else None
