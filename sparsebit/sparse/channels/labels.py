"""Labels of channels: positions of tensors that can be removed only together have one label.

A label is a number. `FIXED` marks a position that must stay (a channel of the input image), `FREE` one that exists at
any size (a value that is broadcast). All other labels stand for *atoms*: one position of one axis of a parameter or a
buffer. Atoms that must be removed together are joined into one set; a set that must stay is pinned, with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
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


def is_free(labels: Tensor | None) -> bool:
    """Whether a dimension could have any size."""
    return labels is not None and bool((labels == FREE).all())


class LabelSets:
    """Disjoint sets of atoms (union-find over tensors). Pins are kept with the set, and the first reason wins."""

    def __init__(self) -> None:
        self.number = next(_NUMBERS)  # which analysis labels belong to
        self.axes: list[Axis] = []
        self._size = 1  # FIXED is a label too
        self._parent = torch.zeros(1024, dtype=torch.long)
        self._is_pinned = torch.zeros(1024, dtype=torch.bool)
        self._reasons: dict[int, str] = {}
        self._wide: list[tuple[Tensor, str]] = []
        self._listed: list[int] | None = None
        self.num_unions = 0  # if it changed, representatives may have changed

    def __len__(self) -> int:
        return self._size

    def add_axis(self, tensor: str, dim: int, size: int) -> Tensor:
        """New atoms for every position of one dimension."""
        first, self._size, self._listed = self._size, self._size + size, None
        while self._size > self._parent.numel():
            self._parent = torch.cat([self._parent, torch.zeros_like(self._parent)])
            self._is_pinned = torch.cat([self._is_pinned, torch.zeros_like(self._is_pinned)])
        self.axes.append(Axis(tensor, dim, size, first))
        labels = torch.arange(first, first + size)
        self._parent[first : first + size] = labels
        return labels

    def find(self, label: int) -> int:
        """The representative of the set of one label."""
        if self._listed is None:
            self._listed = self.roots().tolist()
        return self._listed[label]

    def roots(self, labels: Tensor | None = None) -> Tensor:
        """Every label replaced by the representative of its set; without an argument, of all labels in order."""
        if labels is None:
            labels = torch.arange(self._size)
        atoms = labels.clamp(min=FIXED)
        found = self._parent[atoms]
        while not torch.equal(above := self._parent[found], found):
            found = above
        self._parent[atoms] = found  # shorter paths for the next time
        return torch.where(labels < FIXED, labels, found)

    def join_rows(self, rows: Tensor, reason: str) -> None:
        """Make one set of all labels in a row, `(sets, labels)`. FIXED among them pins the set; FREE has no effect."""
        if rows.numel():
            # FREE and FIXED are smaller than every atom, so the largest label of a row is an atom if the row has one.
            self.join_pairwise(rows.amax(1, keepdim=True).expand_as(rows), rows, reason)

    def join_pairwise(self, first: Tensor, second: Tensor, reason: str) -> None:
        """Join position by position; both have the same shape."""
        one, other = self.roots(first.flatten()), self.roots(second.flatten())
        differ = (one != other) & (one != FREE) & (other != FREE)
        if not bool(differ.any()):
            return
        low, high = torch.minimum(one, other)[differ], torch.maximum(one, other)[differ]
        stays = low == FIXED
        merged = self._united(low[~stays], high[~stays])
        # A pinned set that was merged into another one passes its pin and its reason to the new representative.
        moved = merged[self._is_pinned[merged]].unique()
        self._pin(self.roots(moved), [self._reasons.pop(label) for label in moved.tolist()])
        pinned = self.roots(high[stays])
        pinned = pinned[~self._is_pinned[pinned]].unique()
        self._pin(pinned, [reason] * pinned.numel())

    def _united(self, low: Tensor, high: Tensor) -> Tensor:
        """Unite pairs of representatives; returns those that are no longer representatives."""
        merged = []
        while low.numel():
            self._listed = None
            self.num_unions += 1
            merged.append(high)
            # The smallest label represents its set. Parents therefore only decrease, and a batch of unions makes no
            # cycle.
            self._parent.scatter_reduce_(0, high, low, "amin")
            one, other = self.roots(low), self.roots(high)
            differ = one != other  # a representative that had two partners now has only one of them
            low, high = torch.minimum(one, other)[differ], torch.maximum(one, other)[differ]
        return torch.cat(merged) if merged else high

    def _pin(self, roots: Tensor, reasons: Sequence[str]) -> None:
        self._is_pinned[roots] = True
        for root, reason in zip(roots.tolist(), reasons, strict=True):
            self._reasons.setdefault(root, reason)

    def pin(self, labels: Tensor | None, reason: str) -> None:
        """Every one of these atoms must stay."""
        if labels is not None:
            flat = labels.flatten()
            self.join_pairwise(flat, torch.zeros_like(flat), reason)

    def keep_width(self, labels: Tensor | None, reason: str) -> None:
        """These atoms may become zero, but tensors of activations must not lose them."""
        if labels is not None:
            self._wide.append((labels.flatten(), reason))

    def wide(self) -> Mapping[int, str]:
        """Why sets must keep their places in activations, by their representatives."""
        found: dict[int, str] = {}
        for labels, reason in self._wide:
            for root in self.roots(labels[labels > FIXED]).unique().tolist():
                found.setdefault(root, reason)
        return found

    def reasons(self) -> Mapping[int, str]:
        """Why sets must stay, by their representatives; all others may be removed."""
        return self._reasons
