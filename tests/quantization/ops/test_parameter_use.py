from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.quantization.ops.parameter_use import UseOfParameters, observe_use

STACK, X = (3, 4, 5), 5


def used(weight: Tensor, compute: Callable[[Tensor], object]) -> int | None:
    with torch.no_grad(), UseOfParameters({"weight": weight}) as use:
        compute(weight)
    return use.summed.get("weight")


@pytest.mark.parametrize(
    ("compute", "axis"),
    [
        (lambda w: F.linear(torch.randn(2, 5), w[1]), 2),
        (lambda w: torch.randn(2, 4) @ w[1], 1),
        (lambda w: torch.randn(2, 5) @ w[1].T, 2),
        (lambda w: torch.bmm(torch.randn(3, 2, 4), w), 1),
        (lambda w: torch.bmm(w, torch.randn(3, 5, 1)), 2),
        (lambda w: torch.bmm(w[torch.tensor([0, 2])], torch.randn(2, 5, 1)), 2),
        (lambda w: torch.einsum("bi,eoi->beo", torch.randn(2, 5), w), 2),
        (lambda w: torch.einsum("beo,eoi->bi", torch.randn(2, 3, 4), w), 1),
        (lambda w: torch.randn(2, 5) @ w[0].double().float().mT, 2),
        (lambda w: F.linear(torch.randn(2, 5), w.chunk(3)[2].squeeze(0), torch.randn(4)), 2),
        (lambda w: w[0] @ torch.randn(5), 2),
    ],
)
def test_the_axis_that_a_product_sums_up(compute: Callable[[Tensor], object], axis: int) -> None:
    assert used(torch.randn(STACK), compute) == axis


@pytest.mark.parametrize("transposed", [False, True])
def test_square_matrices_are_told_apart_by_their_strides(transposed: bool) -> None:
    weight, x = torch.randn(4, 6, 6), torch.randn(2, 6)
    assert used(weight, lambda w: x @ (w[1].T if transposed else w[1])) == (2 if transposed else 1)


def test_kernels_of_convolutions() -> None:
    weight = torch.randn(4, 3, 3)
    with torch.no_grad(), UseOfParameters({"weight": weight}) as use:
        F.conv1d(torch.randn(2, 3, 8), weight)
    assert use.channels == {"weight": 0} and not use.summed
    with torch.no_grad(), UseOfParameters({"weight": weight}) as use:
        F.conv_transpose1d(torch.randn(2, 4, 8), weight)
    assert use.channels == {"weight": 1}


@pytest.mark.parametrize("compute", [lambda w: w + 1, lambda w: w[0].sum(), lambda w: F.softmax(w, -1)])
def test_other_uses_are_none(compute: Callable[[Tensor], object]) -> None:
    assert used(torch.randn(STACK), compute) is None


def test_a_forward_leaves_state_and_random_numbers_alone() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.norm = nn.Parameter(torch.randn(5, 5)), nn.BatchNorm1d(5)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.norm(x @ self.weight + torch.rand(5))

    model, x = Noisy(), torch.randn(4, 5)
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    assert observe_use({"weight": model.weight}, model, (x,), {}).summed == {"weight": 0}
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and model.training
