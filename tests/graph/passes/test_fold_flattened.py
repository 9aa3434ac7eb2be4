from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.graph.capture import capture
from sparsebit.graph.passes.fold_batchnorm import fold_batchnorm
from tests.graph.passes.norms import with_statistics


class Tokens(nn.Module):
    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(6, 4, bias=False), with_statistics(nn.BatchNorm1d(4))
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def levit(self: Any, x: Tensor) -> Any:
    x = self.linear(x)
    return self.bn(x.flatten(0, 1)).reshape_as(x).relu()


def as_function(self: Any, x: Tensor) -> Any:
    return self.bn(torch.flatten(self.linear(x), end_dim=-2)).relu()


def by_shape(self: Any, x: Tensor) -> Any:
    y = self.linear(x)
    return self.bn(y.flatten(0, -2)).reshape(y.shape)


def another_reader(self: Any, x: Tensor) -> Any:
    y = self.linear(x)
    return self.bn(y.flatten(0, 1)).reshape_as(y) + y


def reader_of_the_flat_one(self: Any, x: Tensor) -> Any:
    y = self.linear(x).flatten(0, 1)
    return self.bn(y) + y


def other_axes(self: Any, x: Tensor) -> Any:
    return self.bn(self.linear(x[:, None]).flatten(0, 1).transpose(1, 2))


def called_twice(self: Any, x: Tensor) -> Any:
    return self.bn(self.bn(self.linear(x).flatten(0, 1)))


@pytest.mark.parametrize(
    ("forward", "folded"),
    [
        (levit, 1), (as_function, 1), (by_shape, 1), (another_reader, 0), (reader_of_the_flat_one, 0),
        (other_axes, 0), (called_twice, 0),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_what_is_folded(forward: Any, folded: int) -> None:
    torch.manual_seed(0)
    model, x = Tokens(forward).eval(), torch.randn(2, 5, 6)
    expected = model(x)
    region = capture(model, example=((x,), {})).regions[""]
    assert fold_batchnorm(region.graph_module) == folded
    assert sum(isinstance(module, _BatchNorm) for module in region.graph_module.modules()) == 1 - folded
    torch.testing.assert_close(region.graph_module(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(region.source(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(x), expected)  # the user's model stays as it was
    if forward is levit:
        assert not {"flatten", "reshape_as"} & {node.target for node in region.graph_module.graph.nodes}


@pytest.mark.parametrize(("end", "folded"), [(1, 0), (-2, 1)])
def test_without_an_example_all_axes_but_the_last_must_be_named(end: int, folded: int) -> None:
    """Of four axes the first two are flattened: the norm's channels would be others."""
    model = Tokens(lambda self, x: self.bn(self.linear(x).flatten(0, end))).eval()
    assert fold_batchnorm(capture(model).regions[""].graph_module) == folded


def test_four_axes_with_two_of_them_flattened_stay() -> None:
    model = Tokens(lambda self, x: self.bn(self.linear(x).flatten(0, 1))).eval()
    x = torch.randn(2, 3, 4, 6)
    region = capture(model, example=((x,), {})).regions[""]
    assert fold_batchnorm(region.graph_module) == 0
    torch.testing.assert_close(region.graph_module(x), model(x))
