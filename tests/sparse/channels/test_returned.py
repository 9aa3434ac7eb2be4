"""What a model returns keeps its channels, in whatever object it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.sparse.channels.returned import returned_tensors
from sparsebit.sparse.group_search import find_groups


class Result:
    def __init__(self, values: Tensor) -> None:
        self.values = values


class Slotted:
    __slots__ = ("values",)

    def __init__(self, values: Tensor) -> None:
        self.values = values


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "object": Result,
    "slots": Slotted,
    "namespace": lambda y: SimpleNamespace(y=[y]),
    "zip": lambda y: zip([y], [1], strict=True),
    "map": lambda y: map(torch.clone, [y]),
    "generator": lambda y: (one * 2 for one in [y]),
    "in a dictionary": lambda y: {"y": (one for one in [y])},
    "iterator": lambda y: iter([y]),
    "closure": lambda y: lambda: y,
    "default": lambda y: lambda x=y: x,
    "method": lambda y: Result(y).__init__,  # type: ignore[misc]
    "deque": lambda y: deque([y]),
    "set": lambda y: {y},
}


class Net(nn.Module):
    def __init__(self, way: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.way = nn.Linear(4, 8), nn.Linear(8, 6), way

    def forward(self, x: Tensor) -> Any:
        return self.way(self.b(torch.relu(self.a(x))))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", WAYS)
def test_returned_channels_stay(name: str) -> None:
    found = find_groups(Net(WAYS[name]).eval(), torch.randn(2, 4))
    axes = {axis for group in found.groups for axis in group.axes}
    assert axes == {("a.weight", 0), ("a.bias", 0), ("b.weight", 1)}, str(found)


class Yields(Net):
    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        yield h
        yield self.b(h)


def test_a_forward_that_is_a_generator_returns_what_it_yields() -> None:
    found = find_groups(Yields(torch.clone).eval(), torch.randn(2, 4))
    assert not found.groups and "the model returns them" in str(found)


class Writes(Net):
    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        out += self.b(torch.relu(self.a(x)))
        return x


def test_channels_that_are_written_into_an_argument_stay() -> None:
    found = find_groups(Writes(torch.clone).eval(), (torch.randn(2, 4), torch.randn(2, 6)))
    axes = {axis for group in found.groups for axis in group.axes}
    assert axes == {("a.weight", 0), ("a.bias", 0), ("b.weight", 1)}, str(found)


class ReadsAnArgument(Net):
    def forward(self, x: Tensor, more: Any) -> Tensor:
        return self.b(torch.relu(self.a(x)))


def test_iterators_among_the_arguments_are_not_read() -> None:
    more = iter([1, 2])
    find_groups(ReadsAnArgument(torch.clone).eval(), (torch.randn(2, 4), more))
    assert list(more) == [1, 2]


def test_tensors_are_found_once_in_their_order() -> None:
    one, two = torch.ones(1), torch.ones(2)
    loop: list[Any] = [one, {"b": two, "a": one}, None, "text", nn.Linear(1, 1)]
    loop.append(loop)
    assert [id(x) for x in returned_tensors(loop)] == [id(one), id(two)]
