from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.passes.fold_batchnorm import fold_batchnorm
from sparsebit.graph.passes.functional_layers import lift_functional_layers
from tests.graph.passes.norms import with_statistics


class SamePadding(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class SameTransposed(nn.ConvTranspose1d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose1d(x, self.weight, self.bias, stride=self.stride, groups=self.groups)[..., 1:]


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * 1.0


def lifted(model: nn.Module) -> Any:
    region = capture(model.eval()).regions[""]
    lift_functional_layers(region.graph_module)
    return region


@pytest.mark.parametrize(
    ("layer", "kind", "x"),
    [
        pytest.param(SamePadding(4, 6, 3, groups=2), nn.Conv2d, torch.randn(2, 4, 5, 5), id="conv2d"),
        pytest.param(SamePadding(4, 6, 3, bias=False), nn.Conv2d, torch.randn(2, 4, 5, 5), id="conv2d-no-bias"),
        pytest.param(SameTransposed(4, 6, 3, groups=2), nn.ConvTranspose1d, torch.randn(2, 4, 5), id="transposed"),
        pytest.param(OwnLinear(4, 6), nn.Linear, torch.randn(2, 4), id="linear"),
    ],
)
def test_a_layer_with_a_forward_of_its_own(layer: nn.Module, kind: type[nn.Module], x: Tensor) -> None:
    model = nn.Sequential(layer)
    region = lifted(model)
    (target,) = [n.target for n in region.graph_module.graph.nodes if n.op == "call_module"]
    inner = region.graph_module.get_submodule(target)
    assert type(inner) is kind and inner.weight is region.source[0].weight
    torch.testing.assert_close(region.graph_module(x), model(x))
    region.double()
    torch.testing.assert_close(region.graph_module(x.double()), region.source(x.double()))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_folding_reaches_the_own_code_too(bias: bool) -> None:
    model = nn.Sequential(SamePadding(4, 6, 3, bias=bias), with_statistics(nn.BatchNorm2d(6)))
    region = lifted(model)
    assert fold_batchnorm(region.graph_module) == 1
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(region.graph_module(x), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(region.source(x), model(x), rtol=1e-4, atol=1e-5)


class ReadsItsWeight(nn.Conv2d):
    """Reads the shape of its weight, as same-padding layers do, or its numbers."""

    def __init__(self, *, numbers: bool) -> None:
        super().__init__(4, 6, 3, bias=False)
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.weight.shape[-2:]
        y = F.conv2d(F.pad(x, (columns // 2, columns // 2, rows // 2, rows // 2)), self.weight, self.bias)
        return y + self.weight.mean() if self.numbers else y


@pytest.mark.parametrize(("numbers", "folded"), [(False, 1), (True, 0)], ids=["shape", "numbers"])
def test_a_layer_that_reads_the_shape_of_its_weight_is_folded(numbers: bool, folded: int) -> None:
    model = nn.Sequential(ReadsItsWeight(numbers=numbers), with_statistics(nn.BatchNorm2d(6)))
    region = lifted(model)
    assert fold_batchnorm(region.graph_module) == folded
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(region.graph_module(x), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(region.source(x), model(x), rtol=1e-4, atol=1e-5)


def test_numbers_of_a_weight_that_are_read_elsewhere_are_not_folded() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = ReadsItsWeight(numbers=False), nn.BatchNorm2d(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)) * self.conv.weight.abs().mean()

    model = Tied()
    region = lifted(model)
    assert fold_batchnorm(region.graph_module) == 0
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(region.graph_module(x), model(x))


def test_a_weight_under_another_name_is_lifted_but_not_folded() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel, self.norm = nn.Parameter(torch.randn(6, 4)), nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(F.linear(x, self.kernel))

    model = Own()
    region = lifted(model)
    assert [n.target for n in region.graph_module.graph.nodes if n.op == "call_module"] == ["linear", "norm"]
    assert fold_batchnorm(region.graph_module) == 0
    x = torch.randn(3, 4)
    torch.testing.assert_close(region.graph_module(x), model(x))


def test_computed_weights_stay_functional() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, self.weight - self.weight.mean(), self.bias)

    model = nn.Sequential(Standardised(3, 4, 1))
    region = lifted(model)
    assert not [n for n in region.graph_module.graph.nodes if n.op == "call_module"]
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(region.graph_module(x), model(x))
