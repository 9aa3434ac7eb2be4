from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsebit.graph.values.nested import map_nested, tensors_of


class Named(NamedTuple):
    x: Tensor
    name: str


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    rest: tuple[Any, ...] = ()
    made: int = field(default=3, init=False)


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    logits: Tensor | None = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


def test_every_container() -> None:
    x = torch.arange(3.0)
    nest = {"a": [x, (x, None)], "b": Named(x, "n"), "c": Frozen(x, (x, 1)), "d": UserDict(y=x), "e": Output(x)}
    assert len(tensors_of(nest)) == 7
    doubled = map_nested(Tensor, lambda tensor: tensor * 2, nest)
    assert all(torch.equal(tensor, 2 * x) for tensor in tensors_of(doubled))
    assert type(doubled["b"]) is Named and doubled["b"].name == "n"
    assert type(doubled["c"]) is Frozen and doubled["c"].rest[1] == 1 and doubled["c"].made == 3
    assert type(doubled["d"]) is UserDict and type(doubled["e"]) is Output
    assert all(torch.equal(tensor, x) for tensor in tensors_of(nest))  # the original is left alone


def test_plain_values_stay_what_they_are() -> None:
    size = torch.Size([2, 3])
    assert map_nested(Tensor, lambda tensor: None, size) is size
    assert map_nested(Tensor, lambda tensor: None, (None, "x", Frozen)) == (None, "x", Frozen)


def test_results_of_torch() -> None:
    result = torch.max(torch.randn(2, 3), dim=1)
    copied = map_nested(Tensor, torch.clone, result)
    assert type(copied) is type(result) and torch.equal(copied.values, result.values)
