"""Labels of channels: positions of tensors that can be removed only together have one label.

A label is a number. `FIXED` marks a position that must stay (a channel of the input image), `FREE` one that exists at
any size (a value that is broadcast). All other labels stand for *atoms*: one position of one axis of a parameter or a
buffer. Atoms that must live and die together are joined into one set; a set that must stay is pinned, with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

FIXED, FREE = 0, -1
_NUMBERS = itertools.count(1)
# For each dimension of a tensor: the label of every position; None: all positions are fixed.
Axes = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Axis:
    """One dimension of a parameter or buffer; `first` is the label of its position 0, the others follow."""

    tensor: str
    dim: int
    size: int
    first: int


class LabelSets:
    """Disjoint sets of atoms (union-find). Pins are kept with the set, and the first reason wins."""

    def __init__(self) -> None:
        self.number = next(_NUMBERS)  # which analysis labels belong to
        self.axes: list[Axis] = []
        self._parent: list[int] = [FIXED]
        self._reasons: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._parent)

    def add_axis(self, tensor: str, dim: int, size: int) -> Tensor:
        """New atoms for every position of one dimension."""
        first = len(self._parent)
        self.axes.append(Axis(tensor, dim, size, first))
        self._parent.extend(range(first, first + size))
        return torch.arange(first, first + size)

    def find(self, label: int) -> int:
        parent = self._parent
        while parent[label] != label:
            parent[label] = parent[parent[label]]
            label = parent[label]
        return label

    def canonical(self, labels: Tensor) -> Tensor:
        """The labels with every atom replaced by the representative of its set."""
        found, inverse = labels.unique(return_inverse=True)
        roots = [label if label <= FIXED else self.find(label) for label in found.tolist()]
        return torch.tensor(roots, dtype=torch.long)[inverse].view(labels.shape)

    def join(self, labels: Iterable[int], reason: str) -> None:
        """Make one set of all these labels. With FIXED among them the set is pinned; FREE has no effect."""
        found = {label if label <= FIXED else self.find(label) for label in labels} - {FREE}
        is_fixed = FIXED in found
        roots = sorted(found - {FIXED})
        for other in roots[1:]:
            self._parent[other] = roots[0]
            if other in self._reasons:
                self._reasons.setdefault(roots[0], self._reasons.pop(other))
        if is_fixed and roots:
            self._reasons.setdefault(roots[0], reason)

    def join_pairwise(self, first: Tensor, second: Tensor, reason: str) -> None:
        """Join position by position; both have the same shape."""
        if first.equal(second):
            return
        for one, other in set(zip(first.flatten().tolist(), second.flatten().tolist(), strict=True)):
            if one != other:
                self.join((one, other), reason)

    def pin(self, labels: Tensor | None, reason: str) -> None:
        """Every one of these atoms must stay."""
        for label in () if labels is None else labels.unique().tolist():
            self.join((label, FIXED), reason)

    def reason(self, label: int) -> str | None:
        """Why the set of an atom must stay; None: it may be removed."""
        return self._reasons.get(self.find(label))
