from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.graph.capture import capture
from sparsebit.graph.passes.fold_batchnorm import fold_batchnorm
from tests.graph.passes.norms import with_statistics


class Mixed(nn.Module):
    """Convolutions with other kernels on parts of the channels, as in MixNet."""

    def __init__(self, forward: Any = None, *, affine: bool = True) -> None:
        super().__init__()
        self.small, self.large = nn.Conv2d(2, 3, 1), nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False)
        self.bn = with_statistics(nn.BatchNorm2d(7, affine=affine))
        self.run = forward or mixed

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def mixed(self: Any, x: Tensor) -> Any:
    first, second = torch.split(x, [2, 4], 1)
    return self.bn(torch.cat([self.small(first), self.large(second)], 1)).relu()


def by_keyword(self: Any, x: Tensor) -> Any:
    return self.bn(torch.cat((self.large(x[:, 2:]), self.small(x[:, :2])), dim=1))


def shape_read(self: Any, x: Tensor) -> Any:
    y = torch.cat([self.small(x[:, :2]), self.large(x[:, 2:])], 1)
    return self.bn(y).reshape(y.shape[0], -1)


def another_reader(self: Any, x: Tensor) -> Any:
    y = self.small(x[:, :2])
    return self.bn(torch.cat([y, self.large(x[:, 2:])], 1)) + y.sum()


def reader_of_all(self: Any, x: Tensor) -> Any:
    y = torch.cat([self.small(x[:, :2]), self.large(x[:, 2:])], 1)
    return self.bn(y) + y


def an_input_among_them(self: Any, x: Tensor) -> Any:
    return self.bn(torch.cat([self.small(x[:, :2]), x[:, 2:]], 1))


def activation_between(self: Any, x: Tensor) -> Any:
    return self.bn(torch.cat([self.small(x[:, :2]).relu(), self.large(x[:, 2:])], 1))


def called_twice(self: Any, x: Tensor) -> Any:
    y = torch.cat([self.small(x[:, :2]), self.large(x[:, 2:])], 1)
    return self.bn(self.bn(y))


@pytest.mark.parametrize(
    ("forward", "folded"),
    [
        (mixed, 1), (by_keyword, 1), (shape_read, 1), (another_reader, 0), (reader_of_all, 0),
        (an_input_among_them, 0), (activation_between, 0), (called_twice, 0),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_what_is_folded(forward: Any, folded: int, affine: bool) -> None:
    torch.manual_seed(0)
    model, x = Mixed(forward, affine=affine), torch.randn(2, 6, 5, 5)
    model.eval()
    expected = model(x)
    region = capture(model).regions[""]
    assert fold_batchnorm(region.graph_module) == folded
    assert sum(isinstance(module, _BatchNorm) for module in region.graph_module.modules()) == 1 - folded
    torch.testing.assert_close(region.graph_module(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(region.source(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(x), expected)  # the user's model stays as it was


def test_concatenation_along_another_axis_stays() -> None:
    class Tall(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
            self.bn = with_statistics(nn.BatchNorm2d(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(torch.cat([self.one(x), self.two(x)], 2))

    region = capture(Tall().eval()).regions[""]
    assert fold_batchnorm(region.graph_module) == 0
