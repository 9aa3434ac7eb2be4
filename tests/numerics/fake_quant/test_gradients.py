from __future__ import annotations

import math

import pytest
import torch

from sparsebit.numerics.fake_quant import gradients
from sparsebit.numerics.fake_quant.dispatch import fake_quantize
from sparsebit.numerics.qparams import broadcast_to, qparams_from_range
from sparsebit.numerics.spec import Granularity, PerChannel, PerGroup, PerTensor, TensorSpec, num_rows, to_rows

GRANULARITIES = [PerTensor(), PerChannel(0), PerChannel(1), PerGroup(1, 4), PerGroup(1, 5), PerGroup(0, 2)]
SHAPE = (3, 12)
Grads = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    spec: TensorSpec,
    needs: tuple[bool, bool, bool] = (True, True, True),
    gradient: str = "lsq",
) -> Grads:
    granularity = spec.granularity
    numbers = (granularity.axis, granularity.size, spec.qmin, spec.qmax)
    return gradients.backward(grad, x, scale, zero_point, *numbers, gradient, *needs)


def case(spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad, x, scale and zero point; a third of x lies outside the range, at both ends."""
    x = torch.randn(SHAPE, dtype=torch.float64)
    rows = to_rows(x, spec.granularity)
    scale, zero_point = qparams_from_range(rows.amin(1) * 0.5, rows.amax(1) * 0.5, spec)
    return torch.randn(SHAPE, dtype=torch.float64), x, scale.double(), zero_point.double()


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
def test_gradients_are_the_finite_differences_of_the_smooth_surrogate(
    granularity: Granularity, symmetric: bool
) -> None:
    spec = TensorSpec(3, symmetric, granularity)
    grad, *inputs = case(spec)
    x, scale, zero_point = inputs
    # Rounding is replaced by the shift that it makes at this point: the same value, and smooth around it.
    steps = broadcast_to(scale, SHAPE, granularity)
    residue = (x / steps).round() - x / steps

    def loss(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> float:
        steps, shift = (broadcast_to(param, SHAPE, granularity) for param in (scale, zero_point))
        codes = (x / steps + residue + shift).clamp(spec.qmin, spec.qmax)
        return float(((codes - shift) * steps * grad).sum())

    # Codes are whole at this point, so that an end itself is a kink: nobody may stand on it.
    codes = (x / steps).round() + broadcast_to(zero_point, SHAPE, granularity)
    ends = (codes == spec.qmin) | (codes == spec.qmax)
    grad[ends] = 0

    # A ragged last group counts as a whole one.
    num_elements = granularity.size or x.numel() / num_rows(SHAPE, granularity)
    factor = 1 / math.sqrt(num_elements * spec.qmax)
    for position, found in enumerate(backward(grad, x, scale, zero_point, spec)):
        assert found is not None
        expected = torch.zeros_like(found)
        for index in range(found.numel()):
            ends_of_step = []
            for step in (1e-6, -1e-6):
                moved = [t.clone() for t in inputs]
                moved[position].view(-1)[index] += step
                ends_of_step.append(loss(*moved))
            expected.view(-1)[index] = (ends_of_step[0] - ends_of_step[1]) / 2e-6
        torch.testing.assert_close(found, expected * (factor if position else 1), rtol=1e-5, atol=1e-6)


def test_by_hand() -> None:
    spec = TensorSpec(2, True)  # codes -2 to 1
    x = torch.tensor([-3.0, -1.2, 0.3, 0.9, 1.4, 1.6])
    grad = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    grad_x, grad_scale, grad_zero_point = backward(grad, x, torch.tensor(1.0), torch.tensor(0.0), spec)
    assert grad_x is not None and grad_x.tolist() == [0, 2, 4, 8, 16, 0]
    factor = 1 / math.sqrt(6 * 1)
    by_scale = 1 * -2 + 2 * (-1 + 1.2) + 4 * (0 - 0.3) + 8 * (1 - 0.9) + 16 * (1 - 1.4) + 32 * 1
    torch.testing.assert_close(grad_scale, torch.tensor(by_scale * factor))
    torch.testing.assert_close(grad_zero_point, torch.tensor(-(1.0 + 32.0) * factor))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_shapes_and_types_are_those_of_the_inputs(granularity: Granularity, dtype: torch.dtype) -> None:
    spec = TensorSpec(4, False, granularity)
    grad, x, scale, zero_point = case(spec)
    exact = backward(grad.to(dtype).double(), x.to(dtype).double(), scale, zero_point, spec)
    found = backward(grad.to(dtype), x.to(dtype), scale.float(), zero_point.float(), spec)
    for like, ours, truth in zip((x.to(dtype), scale.float(), zero_point.float()), found, exact, strict=True):
        assert ours is not None and truth is not None
        assert (ours.shape, ours.dtype) == (like.shape, like.dtype)
        torch.testing.assert_close(ours, truth.to(like.dtype), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(1), PerGroup(1, 5)], ids=str)
def test_only_what_is_needed_is_computed_and_it_is_the_same(granularity: Granularity) -> None:
    spec = TensorSpec(3, False, granularity)
    arguments = case(spec)
    everything = backward(*arguments, spec)
    for needs in [(True, False, False), (False, True, False), (False, False, True), (True, True, False)]:
        for needed, some, whole in zip(needs, backward(*arguments, spec, needs), everything, strict=True):
            assert (some is not None) == needed
            assert some is None or (whole is not None and torch.equal(some, whole))


def test_arguments_are_left_as_they_were() -> None:
    spec = TensorSpec(3, False, PerChannel(1))
    arguments = case(spec)
    before = [t.clone() for t in arguments]
    backward(*arguments, spec)
    assert all(torch.equal(a, b) for a, b in zip(before, arguments, strict=True))


def test_one_symmetric_bit_has_finite_gradients() -> None:
    spec = TensorSpec(1, True)
    grads = backward(*case(spec), spec)
    assert all(grad is not None and grad.isfinite().all() for grad in grads)


def test_gradients_take_the_memory_order_of_x() -> None:
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    grad = torch.ones(()).expand(2, 3, 4, 4)
    for needs in [(True, False, False), (True, True, True)]:
        grad_x, *_ = backward(grad, x, torch.tensor(0.1), torch.tensor(0.0), TensorSpec(8, True), needs)
        assert grad_x is not None and grad_x.stride() == x.stride()


@pytest.mark.parametrize("kind", ["ste", "lsq"])
def test_a_grid_that_begins_at_zero_is_a_relu(kind: str) -> None:
    spec, zero = TensorSpec(3, False), torch.tensor(0.0)
    x = torch.cat([torch.randn(200) * 3, torch.tensor([0.0, -0.0, 7.5, 7.4, -0.2])]).requires_grad_()
    scale, grad = torch.tensor(1.0, requires_grad=True), torch.randn(205)
    inputs = (x, scale) if kind == "lsq" else (x,)
    apart = fake_quantize(x.relu(), scale, zero, spec, gradient=kind)  # type: ignore[arg-type]
    together = fake_quantize(x, scale, zero, spec, gradient=f"relu_{kind}")  # type: ignore[arg-type]
    assert torch.equal(apart, together)
    expected = torch.autograd.grad(apart, inputs, grad)
    for one, other in zip(torch.autograd.grad(together, inputs, grad), expected, strict=True):
        assert torch.equal(one, other)


def test_two_channels_have_the_gradients_of_two_tensors() -> None:
    grad, x, scale = torch.randn(2, 6), torch.randn(2, 6), torch.tensor([0.2, 0.3])
    together = backward(grad, x, scale, torch.ones(2), TensorSpec(2, False, PerChannel(0)))
    for row in range(2):
        alone = backward(grad[row], x[row], scale[row], torch.tensor(1.0), TensorSpec(2, False))
        for one, other in zip(together, alone, strict=True):
            assert one is not None and other is not None
            torch.testing.assert_close(one[row], other)
