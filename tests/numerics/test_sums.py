from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from sparsebit.numerics import sums
from sparsebit.numerics.sums import JoinSums

SIZES = (1, 5, 1024, 3000)


def vectors(device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(device) for size in SIZES]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_is_summed(device: str) -> None:
    found = torch.ops.sparsebit.sum_each(vectors(device))
    torch.testing.assert_close(found, torch.stack([vector.sum() for vector in vectors(device)]))


def test_the_kernel(interpreted_kernels: dict[str, ModuleType]) -> None:
    x, y = torch.cat(vectors()), torch.empty(len(SIZES))
    starts, launch = sums._rows(SIZES, x.device)
    launch((x, starts, y), ())
    torch.testing.assert_close(y, torch.stack([vector.sum() for vector in vectors()]))


def several(x: Tensor, y: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
    first = (x.sum(1) * factor).sum()
    early = first.reshape(1)
    second = y.sum((0, 2)).flatten().sum()
    whole = y.sum()  # of a tensor of three dimensions
    short = factor.sum()
    long = torch.arange(sums.SHORT + 1.0).sum()  # of no sum
    return early, second, whole, short, long


def test_last_sums_become_one_node() -> None:
    inputs = (torch.randn(4, 5), torch.randn(2, 3, 4), torch.tensor(0.5).reshape(1))
    graph = make_fx(several)(*inputs)
    expected = several(*inputs)
    JoinSums()(graph.graph)
    graph.graph.lint()
    graph.recompile()
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(torch.ops.sparsebit.sum_each.default) == 1
    assert targets.count(torch.ops.aten.sum.default) == 2  # whole, long
    for found, value in zip(graph(*inputs), expected, strict=True):
        torch.testing.assert_close(found, value)


def test_one_alone_stays() -> None:
    graph = make_fx(lambda x: x.sum(1).sum())(torch.randn(4, 5))
    JoinSums()(graph.graph)
    assert torch.ops.aten.sum.default in [node.target for node in graph.graph.nodes]


def test_a_sum_that_another_depends_on() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = x.sum(1).sum()
        return first, (x * first).sum(1).sum(), x.square().sum(1).sum()

    x = torch.randn(4, 5)
    graph = make_fx(both)(x)
    JoinSums()(graph.graph)
    graph.recompile()
    assert [node.target for node in graph.graph.nodes].count(torch.ops.aten.sum.default) == 1
    for found, value in zip(graph(x), both(x), strict=True):
        torch.testing.assert_close(found, value)


def test_it_can_be_a_key() -> None:
    assert JoinSums().uuid() == JoinSums().uuid()
