"""What is learned begins with the codes that a weight has, on any grid, and all of it has a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsebit.numerics.rounding.learned_codes import (
    LearnedCodes,
    RoundingKind,
    StartGrid,
    annealed_beta,
    bounded_offset,
    clipped_codes,
    clipped_grid,
    inverse_rectified_sigmoid,
    latent_start,
    offset_start,
    rectified_sigmoid,
    rounding_penalty,
    soft_start,
)

LOW, HIGH = torch.tensor(-4.0), torch.tensor(3.0)
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


def numbers(count: int = 1000) -> Tensor:
    return torch.empty(count).uniform_(-6, 6, generator=torch.Generator().manual_seed(0))


def test_the_sigmoid_reaches_both_ends_and_has_an_inverse() -> None:
    assert rectified_sigmoid(torch.tensor([-10.0, 0.0, 10.0])).tolist() == [0.0, 0.5, 1.0]
    h = torch.linspace(0.01, 0.99, 50)
    torch.testing.assert_close(rectified_sigmoid(inverse_rectified_sigmoid(h)), h)


def test_soft_rounding_of_nearest_codes_begins_with_the_weight_itself() -> None:
    u = numbers().clamp(LOW, HIGH)
    lower, v = soft_start(u, u.round(), LOW, HIGH)
    soft, hard = lower + rectified_sigmoid(v), lower + (rectified_sigmoid(v) >= 0.5)
    assert torch.equal(hard, u.round())
    assert (soft - u).abs().max() <= 0.06  # a weight that is almost halfway begins a little beside it


@pytest.mark.parametrize("offset", [-2, -1, 1, 2])
def test_present_codes_that_are_not_the_nearest_are_the_start(offset: int) -> None:
    """As after GPTQ. The other choice is on the side of the weight."""
    u = numbers()
    n = (u.round() + offset).clamp(LOW, HIGH)
    lower, v = soft_start(u, n, LOW, HIGH)
    assert torch.equal(lower + (rectified_sigmoid(v) >= 0.5), n)
    assert (lower >= LOW).all() and (lower + 1 <= HIGH).all()
    other = torch.where(n > lower, lower, lower + 1)
    inside = (u > LOW + 1) & (u < HIGH - 1)
    assert ((other - u).abs() <= (n - u).abs() + 1)[inside].all()
    start = offset_start(u, n)
    assert torch.equal(clipped_codes(u + start, LOW, HIGH), n)
    assert torch.equal(bounded_offset(start, start), start)


def test_soft_codes_begin_beside_halfway_and_nearer_to_the_present_code() -> None:
    u, n = torch.tensor([0.52, 0.48, 0.3, 0.7]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    lower, v = soft_start(u, n, LOW, HIGH)
    torch.testing.assert_close(lower + rectified_sigmoid(v), torch.tensor([0.55, 0.45, 0.9, 0.1]))


def test_offsets_of_a_weight_that_is_halfway_begin_at_either_code() -> None:
    """Codes are rounded with the zero point added, so an odd one takes the other of two equally near codes."""
    u, n = torch.tensor([0.5, 0.5, 1.5, 1.5]), torch.tensor([0.0, 1.0, 1.0, 2.0])
    start = offset_start(u, n)
    assert torch.equal(clipped_codes(u + bounded_offset(start, start), LOW, HIGH), n)


def test_offsets_stay_between_the_codes_around_a_weight() -> None:
    u = numbers().clamp(LOW, HIGH)
    start = offset_start(u, u.round())
    for push in (-5.0, 5.0):
        codes = clipped_codes(u + bounded_offset(start + push, start), LOW, HIGH)
        assert ((codes - u).abs() <= 1).all()


def test_gradients_pass_straight_through_inside_the_range() -> None:
    u, v = torch.tensor([0.2, 5.0]), torch.zeros(2, requires_grad=True)
    clipped_codes(u + v, LOW, HIGH).sum().backward()
    assert v.grad is not None and v.grad.tolist() == [1.0, 0.0]


def test_the_penalty_is_zero_where_all_is_decided() -> None:
    assert rounding_penalty(torch.tensor([0.0, 1.0, 1.0]), 2.0) == 0
    assert rounding_penalty(torch.full((3,), 0.5), 2.0) == 1
    assert rounding_penalty(torch.tensor([0.9]), 20.0) > rounding_penalty(torch.tensor([0.9]), 2.0)


def test_the_exponent_falls_after_the_warm_up() -> None:
    assert annealed_beta(0.1) is None
    found = [annealed_beta(p) for p in (0.2, 0.6, 1.0)]
    assert found == pytest.approx([20.0, 11.0, 2.0])


def test_a_range_that_is_cut_on_both_sides() -> None:
    scale, zero_point = torch.tensor(0.1), torch.tensor(5.0)
    one = torch.ones(())
    assert clipped_grid(scale, zero_point, one, one, 0, 15) == (pytest.approx(0.1), 5.0)
    cut, moved = clipped_grid(scale, zero_point, 0.5 * one, one, 0, 15)  # [-0.5, 1.0] becomes [-0.25, 1.0]
    assert float(cut) == pytest.approx(1.25 / 15) and moved == 3
    halved, still = clipped_grid(scale, 0 * zero_point, 0.5 * one, 0.5 * one, -8, 7)
    assert float(halved) == pytest.approx(0.05) and still == 0


def test_latent_weights_begin_with_the_present_codes_near_the_weight() -> None:
    u = numbers().clamp(LOW, HIGH)
    for n in (u.round(), (u.round() + 1).clamp(LOW, HIGH)):
        latent = latent_start(u, n)
        assert torch.equal(clipped_codes(latent, LOW, HIGH), n)
        assert ((latent - u).abs() <= ((n - u).abs() - 0.49).clamp_min(0) + 1e-5).all()


def test_latent_weights_have_the_gradients_of_lsq() -> None:
    """Of the value `s * n`: 1 for the weight inside of the range, `n - u` for the scale, and outside its end."""
    latent = torch.tensor([1.3, -2.6, 9.0], requires_grad=True)
    factor = torch.ones(3, requires_grad=True)
    (factor * clipped_codes(latent / factor, LOW, HIGH)).sum().backward()  # type: ignore[no-untyped-call]
    assert latent.grad is not None and latent.grad.tolist() == [1.0, 1.0, 0.0]
    torch.testing.assert_close(factor.grad, torch.tensor([1 - 1.3, -3 + 2.6, 3.0]))
