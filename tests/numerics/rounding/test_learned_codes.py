"""What is learned begins with the codes that a weight has, on any grid, and all of it has a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsebit.numerics.rounding.learned_codes import LearnedCodes, RoundingKind, StartGrid

KINDS: tuple[RoundingKind, ...] = ("sigmoid", "sign", "latent", "none")


def learned(kind: RoundingKind, *, symmetric: bool) -> tuple[LearnedCodes, Tensor]:
    """A weight of 8 rows with the nearest codes, but for one row that another algorithm moved by one."""
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    scale = weight.abs().amax(1, keepdim=True) / 5
    qmin, qmax = (-8, 7) if symmetric else (0, 15)
    zero_point = torch.zeros_like(scale) if symmetric else torch.full_like(scale, 8)
    codes = (weight / scale + zero_point).round().clamp(qmin, qmax)
    codes[3] = (codes[3] + 1).clamp(qmin, qmax)
    grid = StartGrid(scale, zero_point, qmin, qmax, symmetric)
    return LearnedCodes(weight, codes, grid, kind, learns_scale=True), codes


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_begins_with_the_present_codes(kind: RoundingKind, symmetric: bool) -> None:
    made, codes = learned(kind, symmetric=symmetric)
    scale, zero_point = made.grid()
    assert torch.equal(made.steps(scale, zero_point, hard=True).round() + zero_point, codes)
    assert len(made.factors) == (1 if symmetric or kind in ("sigmoid", "none") else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: RoundingKind) -> None:
    made, _ = learned(kind, symmetric=False)
    made.values().square().sum().backward()
    assert all(factor.grad is not None and bool(factor.grad.abs().sum() > 0) for factor in made.factors)
    if kind != "none":
        assert made.v.grad is not None and bool((made.v.grad != 0).float().mean() > 0.6)


def test_the_scale_has_a_bound() -> None:
    made, _ = learned("sign", symmetric=True)
    scale, zero_point = made.begin.scale, made.begin.zero_point
    smallest = scale * 2
    grid = StartGrid(scale, zero_point, -8, 7, True, smallest_scale=smallest)
    bounded = LearnedCodes(made.original, made.lower, grid, "sign", learns_scale=True)
    assert torch.equal(bounded.grid()[0], smallest) and torch.equal(made.grid()[0], scale)


def test_soft_rounding_alone_has_a_penalty() -> None:
    assert learned("sigmoid", symmetric=True)[0].penalty(0.1) is None
    assert (found := learned("sigmoid", symmetric=True)[0].penalty(0.9)) is not None and bool(found > 0)
    assert learned("sign", symmetric=True)[0].penalty(0.9) is None
