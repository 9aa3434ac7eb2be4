"""Numbers computed from the width, whose effect another argument switches on: then those channels stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.sparse.group_search import find_groups
from sparsebit.sparse.proof.width_numbers import NumbersOfSizes
from tests.sparse.proof.test_other_paths import TWO, Net, pruned


class InTensor(Net):
    def hidden(self, h: Tensor, x: Tensor, kind: int = 0) -> Tensor:
        return h * torch.tensor([1.0, h.shape[1] ** -0.5])[kind]


class Appended(Net):
    def hidden(self, h: Tensor, x: Tensor, kind: int = 0) -> Tensor:
        scales = [1.0]
        scales.append(1 / h.size(1))
        return h * scales[kind]


class Sorted(Net):
    def hidden(self, h: Tensor, x: Tensor, kind: int = 2) -> Tensor:
        return h / sorted([h.shape[1], kind])[0]


class Power(Net):
    def hidden(self, h: Tensor, x: Tensor, kind: int = 0) -> Tensor:
        return h * h.shape[1] ** kind


class Root(Net):
    def hidden(self, h: Tensor, x: Tensor, kind: int = 0) -> Tensor:
        return h + kind * math.sqrt(h.shape[-1])


class OfLayer(Net):
    def hidden(self, h: Tensor, x: Tensor, kind: int = 0) -> Tensor:
        return h * self.a.out_features**kind


class OfAttribute(Net):
    """The view needs the attribute, so that it follows the channels."""

    def hidden(self, h: Tensor, x: Tensor, kind: int = 0) -> Tensor:
        return h.view(-1, self.width) * self.width**kind


class Length(Net):
    def hidden(self, h: Tensor, x: Tensor, kind: int = 0) -> Tensor:
        return h + kind * len(h[0])


class Table(Net):
    def hidden(self, h: Tensor, x: Tensor, kind: int = 0) -> Tensor:
        return h + kind * {12: 0.5}.get(h.shape[1], 0.25)


class Truth(Net):
    def hidden(self, h: Tensor, x: Tensor, kind: int = 0) -> Tensor:
        is_wide = h.shape[1] > 11
        return h + kind * is_wide


SWITCHED: dict[str, tuple[type[Net], Any]] = {
    "in a tensor": (InTensor, 1),
    "appended": (Appended, 1),
    "sorted": (Sorted, 100),
    "power": (Power, 1),
    "root": (Root, 1),
    "of a layer": (OfLayer, 1),
    "of an attribute": (OfAttribute, 1),
    "length": (Length, 1),
    "table": (Table, 1),
    "truth": (Truth, 1),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SWITCHED)
def test_the_smaller_model_equals_the_masked_one_for_another_argument(name: str) -> None:
    kind, switch = SWITCHED[name]
    model = kind().eval()
    found = find_groups(model, TWO)
    assert ("c.weight", 0) in {axis for group in found.groups for axis in group.axes}, str(found)
    assert "computes with their number (test_width_numbers.py:" in str(found)
    masked, small = pruned(model, found, 0)
    with torch.no_grad():
        torch.testing.assert_close(small(TWO, kind=switch), masked(TWO, kind=switch), atol=1e-5, rtol=1e-4)


class Sizes(Net):
    """Sizes as sizes, parts of them, and conditions: all channels can go."""

    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        batch, width = h.shape
        if not width > 0 or width < 1:
            return h
        assert h.shape[1] == width
        whole = h.new_zeros(batch, width) + h.view(batch, width).reshape(h.shape)
        half = h[:, : int(width / 2)].shape[1] + math.floor(width / 2)
        return whole.expand(batch, width) if half else h


def test_sizes_that_stay_sizes_keep_nothing() -> None:
    found = find_groups(Sizes().eval(), TWO)
    assert ("a.weight", 0) in {axis for group in found.groups for axis in group.axes}, str(found)


USED: dict[str, Callable[[Tensor], Any]] = {
    "division": lambda h: h.shape[1] / 2,
    "operand": lambda h: h * h.size(-1),
    "function": lambda h: torch.where(h > 0, h.shape[1], 1),
    "float": lambda h: float(h.numel()),
    "written": lambda h: h.__setitem__(0, h.shape[1]),
    "numpy": lambda h: pytest.importorskip("numpy").sqrt(h.shape[1]),
    "minimum": lambda h: min(h.shape[1], 3),
}
UNUSED: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda h: h.view(h.shape[1], -1),
    "index": lambda h: h[:, h.shape[1] // 2 :],
    "rounded": lambda h: round(h.shape[1] / 2) + int(h.shape[1] / 2) + math.ceil(h.shape[1] / 2),
    "text": lambda h: f"{h.shape[1]} {h.shape}",
    "condition": lambda h: 1 if h.shape[1] in (3, 4) or not h.shape[0] > 2 else 2,
}


@pytest.mark.parametrize("name", [*USED, *UNUSED])
def test_uses_as_a_number(name: str) -> None:
    numbers = NumbersOfSizes(nn.Module())
    with numbers:
        {**USED, **UNUSED}[name](torch.ones(2, 12))
    assert any(numbers.found.values()) == (name in USED)
