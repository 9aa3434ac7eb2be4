from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsebit.numerics.rounding import cuda_graph
from sparsebit.numerics.rounding.cuda_graph import Replayed
from sparsebit.numerics.rounding.gptq_math import quantize
from sparsebit.numerics.rounding.scale_search_math import Rounding
from sparsebit.numerics.spec import PerGroup, TensorSpec
from sparsebit.numerics.weight_grid import Grid

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def summed(step: Tensor, total: Tensor, last: Tensor) -> None:
    total += step
    last.copy_(total * 2)


@pytest.mark.parametrize("device", DEVICES)
def test_every_call_reads_and_writes_the_tensors_that_it_is_given(device: str) -> None:
    run = Replayed(summed)
    totals = torch.zeros(6, 4, 3, device=device)
    for number, total in enumerate(totals):
        step, last = torch.full((3,), float(number), device=device), torch.empty(3, 4, device=device).t()
        run([step], [total, last])
        run([step], [total, last])
        assert torch.equal(total, 2 * step.expand(4, 3)) and torch.equal(last, 4 * step.expand(4, 3))
    assert (run._graph is not None) == (device == "cuda")


@pytest.mark.gpu
def test_another_shape_runs_as_it_is_and_the_graph_stays() -> None:
    run = Replayed(summed)
    for size in (3, 3, 2, 3, 1):
        step, total, last = torch.ones(size).cuda(), torch.zeros(size).cuda(), torch.zeros(size).cuda()
        run([step], [total, last])
        assert total.tolist() == [1.0] * size and last.tolist() == [2.0] * size


@pytest.mark.gpu
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("act_order", [True, False])
def test_gptq_with_graphs_gives_what_it_gives_without(
    symmetric: bool, act_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    W, x = torch.randn(1, 24, 208, device="cuda"), torch.randn(1000, 208, device="cuda")
    H = (x.mT @ x / 1000).double()[None]
    index = torch.arange(24 * 13, device="cuda").view(24, 13).repeat_interleave(16, 1)[None]
    groups = W[0].unflatten(1, (13, 16))
    scale = (groups.amax(-1) - groups.amin(-1)).flatten() / 15
    zero_point = torch.zeros_like(scale) if symmetric else (-groups.amin(-1).flatten() / scale).round().clamp(0, 15)
    grid = Grid(scale, zero_point, index, TensorSpec(4, symmetric, PerGroup(1, 16)))
    rounding = Rounding(act_order=act_order, block_size=32)
    found = quantize(W, H, grid, rounding)
    monkeypatch.setattr(cuda_graph.Replayed, "__call__", lambda self, reads, writes: self.function(*reads, *writes))
    plain = quantize(W, H, grid, rounding)
    assert torch.equal(found.codes, plain.codes) and torch.equal(found.grid.scale, plain.grid.scale)
