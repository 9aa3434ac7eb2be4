"""Operators in XNNPACK's forms compute the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from sparsebit.deploy.programs.to_program import to_program
from sparsebit.deploy.programs.xnnpack_patterns import lay_out_for_xnnpack

IMAGES = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(0))


class Op(nn.Module):
    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x)


OPS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "one window": (lambda x: F.adaptive_avg_pool2d(x, 1), "mean.dim"),
    "equal windows": (lambda x: F.adaptive_avg_pool2d(x, (4, 3)), "avg_pool2d"),
    "mean": (lambda x: x.mean((2, 3)), "squeeze.dims"),
    "mean with negative dims": (lambda x: x.mean((-1, -2)), "squeeze.dims"),
    "mean that keeps its rank": (lambda x: x.mean((3, 2), keepdim=True), "mean.dim"),
    "windows of different sizes": (lambda x: F.adaptive_avg_pool2d(x, (3, 5)), "adaptive_avg_pool2d"),
    "mean over channels": (lambda x: x.mean(1), "mean.dim"),
    "mean over rows and channels": (lambda x: x.mean((1, 2)), "mean.dim"),
}


@pytest.mark.parametrize("name", OPS)
def test_pools_and_means(name: str) -> None:
    op, last = OPS[name]
    program = to_program(Op(op), (IMAGES,), {}, lay_out=lay_out_for_xnnpack)
    assert torch.equal(program.module()(IMAGES), op(IMAGES)) or name == "equal windows"
    torch.testing.assert_close(program.module()(IMAGES), op(IMAGES))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert last in called[-1]


@pytest.mark.parametrize(
    "op", [lambda x: x.flatten(1), lambda x: x.reshape(x.shape[0], 6, -1), lambda x: x.view(-1, 12)]
)
def test_an_open_size_is_inferred(op: Callable[[Tensor], Tensor]) -> None:
    program = to_program(Op(op), (IMAGES,), {}, {"x": {0: Dim("batch", max=9)}}, lay_out=lay_out_for_xnnpack)
    more = torch.cat([IMAGES, IMAGES.flip(0), IMAGES[:1]])
    assert torch.equal(program.module()(more), op(more))
    sizes = [node.args[1] for node in program.graph.nodes if "view" in str(node.target)]
    assert sizes and all(isinstance(size, int) for size in sizes[0])
