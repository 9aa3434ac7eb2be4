"""One operator call, as the channel rules see it, and operations on labels that several rules share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsebit.sparse.channels.labels import FIXED, FREE, Axes, LabelSets

Pin = tuple[Callable[[Tensor | None, str], None], Tensor | None, str]  # `act(labels, reason)`, for later


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
    # Sizes that are not a dimension of a tensor: the labels of the groups of a convolution.
    groups: list[Tensor] = field(default_factory=list)
    # What is pinned, or keeps its width, if anything uses the result of the call.
    when_used: list[Pin] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.op._schema.name).removeprefix("aten::")

    def described(self) -> str:
        return f"{self.name} in {self.where or 'the model'}"

    def argument(self, name: str, default: Any = None) -> Any:
        names = [declared.name for declared in self.op._schema.arguments]
        place = names.index(name) if name in names else len(self.args)
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    def tensors(self) -> list[Tensor]:
        return tensor_leaves((self.args, self.kwargs))

    def unlabelled(self) -> list[Axes]:
        """Outputs all of whose positions are fixed."""
        return [(None,) * output.dim() for output in self.outputs]


def tensor_leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def or_fixed(labels: Tensor | None, size: int) -> Tensor:
    return torch.full((size,), FIXED) if labels is None else labels


def pin_all(sets: LabelSets, call: Call, reason: str) -> list[Axes]:
    for tensor in call.tensors():
        for labels in call.axes_of(tensor):
            sets.pin(labels, reason)
    return call.unlabelled()


def shared(sets: LabelSets, found: list[Tensor | None], size: int, call: Call) -> Tensor | None:
    """One dimension that several tensors have in common: position by position, their labels are removed together."""
    if all(labels is None for labels in found):
        return None
    full = torch.stack([or_fixed(labels, size) for labels in found])
    for labels in full[1:]:
        sets.join_pairwise(full[0], labels, f"{call.described()} combines them with values that must stay")
    if bool((full == FREE).all()):
        return full[0]
    return full.amax(0) if bool((full > FIXED).any()) else None
