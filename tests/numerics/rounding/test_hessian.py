from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsebit.errors import CalibrationError
from sparsebit.numerics.rounding import hessian as hessian_module
from sparsebit.numerics.rounding.hessian import InputMoments, activation_order, damped, inverse_factor


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_moments_over_batches_are_those_of_all_rows(dtype: torch.dtype) -> None:
    x, original = rows(3, 50, 7) + 1, rows(3, 50, 7, seed=1) - 2
    moments = InputMoments(dtype)
    for part, other in zip(x.split(13, 1), original.split(13, 1), strict=True):
        moments.add(part, other)
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(moments.hessian(), x.mT @ x / 50, **close)
    torch.testing.assert_close(moments.cross(), original.mT @ x / 50, **close)
    torch.testing.assert_close(moments.mean, x.mean(1), **close)
    centered, other = x - x.mean(1, keepdim=True), original - original.mean(1, keepdim=True)
    torch.testing.assert_close(moments.hessian(centered=True), centered.mT @ centered / 50, **close)
    torch.testing.assert_close(moments.cross(centered=True), other.mT @ centered / 50, **close)
    assert moments.hessian().dtype == torch.float64 and torch.equal(moments.hessian(), moments.hessian().mT)


def test_merged_moments_are_those_of_both() -> None:
    x = rows(1, 40, 5)
    whole, first, second = (InputMoments(torch.float64) for _ in range(3))
    whole.add(x)
    first.add(x[:, :15])
    second.add(x[0, 15:])
    again = InputMoments.from_state(first.state())
    again.merge(second)
    again.merge(InputMoments())
    torch.testing.assert_close(again.hessian(), whole.hessian())
    assert again.num_rows == whole.num_rows == 40
    assert first.num_rows == 15
    torch.testing.assert_close(first.hessian(), x[:, :15].mT @ x[:, :15] / 15)


def test_rows_that_count_less() -> None:
    x, original = rows(2, 40, 5) + 1, rows(2, 40, 5, seed=1) - 2
    weighted, repeated = InputMoments(torch.float64), InputMoments(torch.float64)
    weighted.add(x[:, :10], original[:, :10], 0.25)
    weighted.add(x[:, 10:], original[:, 10:])
    repeated.add(x[:, :10], original[:, :10])
    for _ in range(4):
        repeated.add(x[:, 10:], original[:, 10:])
    again = InputMoments.from_state(weighted.state())
    for centered in (False, True):
        torch.testing.assert_close(again.hessian(centered=centered), repeated.hessian(centered=centered))
        torch.testing.assert_close(again.cross(centered=centered), repeated.cross(centered=centered))
    torch.testing.assert_close(again.original_mean, repeated.original_mean)
    assert again.num_rows == 40


def test_wrong_inputs() -> None:
    moments = InputMoments()
    with pytest.raises(CalibrationError, match="no input"):
        moments.hessian()


@pytest.mark.parametrize("damping", [0.0, 0.01, 0.3])
def test_the_factor_is_that_of_the_inverse(damping: float) -> None:
    x = rows(2, 60, 9)
    hessian = x.mT @ x / 60
    factor = inverse_factor(hessian, damping)
    expected = torch.linalg.inv(damped(hessian, damping))
    torch.testing.assert_close(factor.mT @ factor, expected)
    assert torch.equal(factor, factor.triu())


def test_damping_is_of_the_mean_of_live_columns() -> None:
    hessian = torch.diag(torch.tensor([0.5, 0.0, 3.5], dtype=torch.float64))[None]
    assert damped(hessian, 0.1).diagonal(dim1=1, dim2=2).tolist() == [[0.7, 1.0, 3.7]]


@pytest.mark.parametrize("damping", [0.0, 1e-12, 0.01])
@pytest.mark.parametrize("block", [5, 512], ids=["blocks", "whole"])
def test_singular_matrices(block: int, damping: float, monkeypatch: pytest.MonkeyPatch) -> None:
    few = rows(1, 4, 12)
    few[:, :, 5] = 0  # dead
    few[:, :, 7] = few[:, :, 6]  # twice the same
    good = rows(1, 60, 12, seed=1)
    hessian = torch.cat([few.mT @ few / 4, good.mT @ good / 60, torch.zeros(1, 12, 12, dtype=torch.float64)])
    monkeypatch.setattr(hessian_module, "_FACTOR_BLOCK", block)
    factor = inverse_factor(hessian, damping)
    assert torch.isfinite(factor).all() and (factor.diagonal(dim1=1, dim2=2) > 0).all()
    torch.testing.assert_close(factor[1].mT @ factor[1], torch.linalg.inv(damped(hessian[1:2], damping))[0])
    assert factor[0, 5, 6:].abs().max() == 0 and factor[0, 5, 5] == 1
    assert torch.equal(factor[2], torch.eye(12, dtype=torch.float64))


@pytest.mark.parametrize("block", [1, 512], ids=["blocks", "whole"])
def test_moments_are_made_symmetric(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessian_module, "_BLOCK", block)
    matrix = torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]])
    assert hessian_module._symmetric_(matrix).tolist() == [[[1.0, 3.0, 5.0], [3.0, 5.0, 7.0], [5.0, 7.0, 9.0]]]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    hessian = torch.eye(3, dtype=torch.float64)[None].clone()
    hessian[0, 1, 1] = value
    with pytest.raises(CalibrationError, match="not finite"):
        inverse_factor(hessian)


def test_the_order_is_that_of_the_second_moments() -> None:
    diagonal = torch.tensor([[1.0, 3.0, 3.0, 0.0, 9.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    assert activation_order(torch.diag_embed(diagonal)).tolist() == [[4, 1, 2, 0, 3], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("block", [3, 512], ids=["blocks", "whole"])
@pytest.mark.parametrize("is_ordered", [True, False], ids=["ordered", "plain"])
def test_the_factor_is_that_of_the_ordered_columns(
    block: int, is_ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hessian_module, "_BLOCK", block)
    monkeypatch.setattr(hessian_module, "_FACTOR_BLOCK", block)
    x = rows(2, 60, 8)
    H = x.mT @ x / 60
    order = activation_order(H) if is_ordered else torch.arange(8).expand(2, 8)
    expected = torch.stack([one[own][:, own] for one, own in zip(damped(H, 0.01), order, strict=True)])
    U = inverse_factor(H, 0.01, order if is_ordered else None)
    torch.testing.assert_close(U.mT @ U, torch.linalg.inv(expected))
    assert torch.equal(U, U.triu())


@pytest.mark.parametrize("block", [3, 512], ids=["blocks", "whole"])
def test_taken_moments_are_the_same(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessian_module, "_BLOCK", block)
    x, original = rows(2, 30, 8).float(), rows(2, 30, 8, seed=1).float()
    moments, alone = InputMoments(), InputMoments()
    moments.add(x, original)
    alone.add(x)
    hessian, cross = moments.hessian(), moments.cross()
    assert torch.equal(hessian, hessian.mT)
    taken = moments.take()
    assert taken[1] is not None and torch.equal(taken[0], hessian) and torch.equal(taken[1], cross)
    assert moments.num_rows == 0 and alone.take()[1] is None
    with pytest.raises(CalibrationError, match="no input"):
        moments.hessian()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_on_a_gpu_loses_nothing(dtype: torch.dtype) -> None:
    """Their products are exact in float32; inputs of two types, as of a model with a float part, work too."""
    x, original = ((rows(1, 4096, 96, seed=seed) + 3).to(dtype).cuda() for seed in (0, 1))
    moments = InputMoments()
    moments.add(x, original)
    moments.add(x, original.float())
    for found, (left, right) in ((moments.hessian(), (x, x)), (moments.cross(), (original, x))):
        torch.testing.assert_close(found, left.double().mT @ right.double() / 4096, rtol=1e-5, atol=0.0)
