"""The GPU's kernels: in triton's interpreter wherever triton is installed, and for real where there is a GPU.

The interpreter cuts bfloat16 off where a GPU rounds, and has no fused multiply-add: there one unit in the last place of
bfloat16 is allowed, and division is another one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from sparsebit.kernels.activations import ACTIVATIONS, with_activation
from sparsebit.numerics import plain
from sparsebit.numerics.fake_quant import gradients
from sparsebit.numerics.fake_quant.dispatch import fake_quantize
from sparsebit.numerics.fake_quant.memory_layout import stack_form
from sparsebit.numerics.spec import Granularity, PerChannel, PerGroup, PerTensor, TensorSpec, num_rows

GRANULARITIES = [PerTensor(), PerChannel(0), PerChannel(1), PerChannel(-1), PerGroup(-1, 4)]


@pytest.fixture
def kernels(load_kernels: Callable[[str], ModuleType]) -> ModuleType:
    return load_kernels("fake_quant")


def case(
    x: Tensor, granularity: Granularity, symmetric: bool, device: str
) -> tuple[Tensor, Tensor, Tensor, tuple[int | None, int, int, int]]:
    """X on its device with parameters that clip a third of it; one scale is below zero."""
    spec = TensorSpec(4, symmetric, granularity)
    count = num_rows(x.shape, granularity)
    scale = torch.rand(count) * 0.1 + 0.1
    scale[0] *= -1
    zero_point = torch.zeros(count) if symmetric else torch.randint(3, 12, (count,)) + 0.3
    if granularity.axis is None:
        scale, zero_point = scale[0], zero_point[0]
    numbers = (granularity.axis, granularity.size, spec.qmin, spec.qmax)
    return x.to(device), scale.to(device), zero_point.to(device), numbers


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.stride() == expected.stride() and found.dtype == expected.dtype
    if found.is_cuda or found.dtype != torch.bfloat16:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)


def images(dtype: torch.dtype = torch.float32, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    return torch.randn(2, 4, 3, 8).to(dtype).contiguous(memory_format=layout)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forward_is_that_of_plain_torch(
    kernels: ModuleType, device: str, granularity: Granularity, layout: torch.memory_format, dtype: torch.dtype
) -> None:
    for symmetric in (True, False):
        x, scale, zero_point, numbers = case(images(dtype, layout), granularity, symmetric, device)
        found = kernels.fake_quantize(x, scale, zero_point, *numbers)
        assert_same(found, plain.fake_quantize(x, scale, zero_point, *numbers))


@pytest.mark.sample(12)
@pytest.mark.parametrize("gradient", ["ste", "lsq", "pact"])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels-last"])
def test_gradients_are_those_of_plain_torch(
    kernels: ModuleType, device: str, granularity: Granularity, layout: torch.memory_format, gradient: str
) -> None:
    learns = gradient != "ste"
    for symmetric in (True, False):
        x, scale, zero_point, numbers = case(images(torch.float32, layout), granularity, symmetric, device)
        grad = torch.randn_like(x)
        some = [(True, True, False), (False, True, False), (False, False, True)] if granularity == PerTensor() else []
        for needs in ((True, learns, learns), *(some if learns else [])):
            arguments = (grad, x, scale, zero_point, *numbers, gradient, *needs)
            found, expected = kernels.backward(*arguments), gradients.backward(*arguments)
            assert [tensor is None for tensor in found] == [not needed for needed in needs]
            for position, (one, other) in enumerate(zip(found, expected, strict=True)):
                if one is None:
                    continue
                assert one.shape == other.shape and one.dtype == other.dtype
                if position == 0:
                    assert_same(one, other)
                else:
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gradient", ["relu_ste", "relu_lsq"])
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(1), PerChannel(-1)], ids=str)
def test_gradients_of_a_relu_in_front(
    kernels: ModuleType, device: str, granularity: Granularity, gradient: str
) -> None:
    x, scale, zero_point, (axis, size, _, _) = case(images(), granularity, True, device)
    needs = (True, gradient == "relu_lsq", False)
    arguments = (torch.randn_like(x), x, scale, zero_point, axis, size, 0, 15, gradient, *needs)
    found, expected = kernels.backward(*arguments), gradients.backward(*arguments)
    assert torch.equal(found[0], expected[0]) and not found[0][x <= 0].any()
    if found[1] is not None:
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(1)], ids=str)
def test_many_tiles_for_a_program_and_the_counter_is_left_at_zero(
    kernels: ModuleType,
    device: str,
    granularity: Granularity,
    layout: torch.memory_format,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = kernels.Cut(64, 1, programs=8)
    monkeypatch.setattr(kernels, "WHOLE", kernels.Cuts(small, small, small, small))
    kernels._tiles.cache_clear()
    try:
        images = torch.randn(4, 6, 10, 10).contiguous(memory_format=layout)
        x, scale, zero_point, numbers = case(images, granularity, True, device)
        y = kernels.fake_quantize(x, scale, zero_point, *numbers)
        assert torch.equal(y, plain.fake_quantize(x, scale, zero_point, *numbers))
        grad = torch.randn_like(x)
        arguments = (grad, x, scale, zero_point, *numbers, "lsq", True, True, True)
        runs = [kernels.backward(*arguments) for _ in range(3)]
        for one, other in zip(runs[0], gradients.backward(*arguments), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        for again in runs[1:]:  # the same bits each time
            assert all(torch.equal(one, other) for one, other in zip(runs[0], again, strict=True))
    finally:
        kernels._tiles.cache_clear()


@pytest.mark.parametrize("gradient", ["ste", "lsq"])
def test_rows_with_gaps_between_them_are_not_copied(
    kernels: ModuleType, device: str, gradient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heads of an attention, cut out of one product."""
    product = torch.randn(2, 5, 3, 4, 6, device=device)
    heads = product.permute(2, 0, 3, 1, 4)[1]  # (2, 4, 5, 6): runs of 24, then a gap of 48
    x, scale, zero_point, numbers = case(heads, PerTensor(), True, device)
    assert not x.is_contiguous() and len(kernels._runs(x.shape, x.stride())) == 2
    expected = plain.fake_quantize(x, scale, zero_point, *numbers)
    needs = (True, gradient == "lsq", False)
    arguments = (torch.randn_like(x), x, scale, zero_point, *numbers, gradient, *needs)
    expected_grads = gradients.backward(*arguments)

    def refuse(*_: object) -> None:
        pytest.fail("copied")

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "copy_", refuse)
        assert_same(kernels.fake_quantize(x, scale, zero_point, *numbers), expected)
        found = kernels.backward(*arguments)
    assert_same(found[0], expected_grads[0])
    if gradient == "lsq":
        torch.testing.assert_close(found[1], expected_grads[1], rtol=1e-4, atol=1e-5)


def test_what_cannot_be_tiled_is_right_too(kernels: ModuleType, device: str) -> None:
    gaps = torch.randn(4, 2, 8, 6)[:, 0].transpose(1, 2)
    for x, granularity in (
        (gaps, PerTensor()),
        (gaps, PerChannel(1)),
        (torch.randn(4, 10), PerGroup(1, 4)),  # a ragged last group
        (torch.randn(8, 3), PerGroup(0, 4)),  # groups along the slow axis
        (torch.randn(4, 6, dtype=torch.float64), PerChannel(0)),
        (torch.randn(0, 6), PerTensor()),
    ):
        x, scale, zero_point, numbers = case(x, granularity, True, device)
        found = kernels.fake_quantize(x, scale, zero_point, *numbers)
        assert torch.equal(found, plain.fake_quantize(x, scale, zero_point, *numbers))
        arguments = (torch.randn_like(x), x, scale, zero_point, *numbers, "lsq", True, True, False)
        for one, other in zip(kernels.backward(*arguments), gradients.backward(*arguments), strict=True):
            assert (one is None and other is None) or torch.allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy
def test_strange_values(kernels: ModuleType, device: str) -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-40, -0.0, 0.25, 0.75], device=device)
    one, zero = torch.tensor(0.5, device=device), torch.tensor(0.0, device=device)
    found = kernels.fake_quantize(x, one, zero, None, 0, -8, 7)
    torch.testing.assert_close(found, plain.fake_quantize(x, one, zero, None, 0, -8, 7), equal_nan=True, rtol=0, atol=0)
    assert kernels.fake_quantize(x, one * torch.nan, zero, None, 0, -8, 7).isnan().all()
    assert kernels.fake_quantize(x, one, zero * torch.nan, None, 0, -8, 7).isnan().all()


def test_rows_of_many_weights_at_once(device: str, request: pytest.FixtureRequest) -> None:
    rows = (
        request.getfixturevalue("interpreted_kernels")["foreach_fake_quant"]
        if device == "cpu"
        else importlib.import_module("sparsebit.kernels.foreach_fake_quant")
    )
    shapes, bits = [(8, 4, 3, 3), (5, 70), (6, 1, 3, 3), (3, 1100)], [4, 8, 2, 4]
    weights = [torch.randn(shape, device=device) for shape in shapes]
    weights[0] = weights[0].contiguous(memory_format=torch.channels_last)
    weights = [weight.requires_grad_() for weight in weights]
    scales = [(torch.rand(len(w), device=device) * 0.1 + 0.1).requires_grad_() for w in weights]
    specs = [TensorSpec(width, True, PerChannel(0)) for width in bits]
    forms = [
        rows.RowForm(tuple(weight.shape), weight.stride(), spec.qmin, spec.qmax)
        for weight, spec in zip(weights, specs, strict=True)
    ]
    batch = rows.RowBatch(forms, weights[0].device)
    found = rows.fake_quantize_rows(batch, weights, scales, torch.float32, learns=True)
    grads = [torch.randn(weight.shape, device=device) for weight in weights]
    found_grads = torch.autograd.grad(found, [*weights, *scales], grads)
    for number, (weight, scale, spec) in enumerate(zip(weights, scales, specs, strict=True)):
        expected = fake_quantize(weight, scale, torch.zeros_like(scale), spec, gradient="lsq")
        assert_same(found[number], expected)
        by_weight, by_scale = torch.autograd.grad(expected, [weight, scale], grads[number])
        assert torch.equal(found_grads[number], by_weight)
        torch.testing.assert_close(found_grads[len(weights) + number], by_scale, rtol=1e-4, atol=1e-5)
    found = rows.fake_quantize_rows(batch, weights, scales, torch.float32, learns=True)
    some = torch.autograd.grad(found[1].sum(), [*weights, *scales], allow_unused=True)
    assert [grad is not None for grad in some] == [False, True, False, False] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_function_in_front(kernels: ModuleType, device: str, activation: str, dtype: torch.dtype) -> None:
    """The function is torch's to the last bits: a number in the middle between two codes may go to the other one."""
    function = ACTIVATIONS[activation]
    values = torch.cat([torch.linspace(-8, 8, 900), torch.randn(300) * 1e-3, torch.zeros(8)]).reshape(2, 604).to(dtype)
    x, scale, zero_point, numbers = case(values, PerTensor(), False, device)
    found = kernels.fake_quantize(x, scale, zero_point, *numbers, torch.float32, activation)
    expected = plain.fake_quantize(function.value(x).float(), scale, zero_point, *numbers)
    is_cut_off = device == "cpu" and dtype == torch.bfloat16
    assert found.dtype == torch.float32 and (found != expected).float().mean() < (0.1 if is_cut_off else 0.005)
    torch.testing.assert_close(found, expected, rtol=0, atol=1.01 * float(scale.abs()))

    grad = torch.randn_like(x)
    rest = (*numbers, "lsq", True, True, True)
    grads = kernels.backward(grad, x, scale, zero_point, *rest, activation)
    expected_grads = with_activation(gradients.backward, grad, x, scale, zero_point, rest, activation)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    close = torch.isclose(grads[0], expected_grads[0], rtol=tolerance, atol=tolerance)
    assert grads[0].dtype == dtype and (~close).float().mean() < (0.1 if is_cut_off else 0.005)  # at an end
    for one, other in zip(grads[1:], expected_grads[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=0.1 if is_cut_off else 0.02, atol=0.1 if is_cut_off else 0.02)


def test_gelu_to_seven_digits(kernels: ModuleType, device: str) -> None:
    """Seen through a grid that is finer than float32 there."""
    x = torch.linspace(-6, 6, 4001, device=device)
    scale, zero = torch.tensor(2.0**-17, device=device), torch.tensor(0.0, device=device)
    found = kernels.fake_quantize(x, scale, zero, None, 0, -(2**19), 2**20, None, "gelu")
    exact = 0.5 * x.double() * (1 + torch.erf(x.double() / 2**0.5))
    assert float((found.double() - exact).abs().max()) < 2.0**-17


@pytest.mark.parametrize("activation", ["", "silu"])
def test_what_has_no_tiles_for_it_is_right_too(kernels: ModuleType, device: str, activation: str) -> None:
    """Channels-last with a scale for each channel, and tensors with gaps."""
    for x, granularity in (
        (images(layout=torch.channels_last), PerChannel(1)),
        (torch.randn(4, 2, 8, 6)[:, 0].transpose(1, 2), PerTensor()),
        (torch.randn(4, 10), PerGroup(1, 4)),
        (torch.randn(6, 3, 8)[:, 1], PerTensor()),
    ):
        x, scale, zero_point, numbers = case(x, granularity, False, device)
        found = kernels.fake_quantize(x, scale, zero_point, *numbers, None, activation)
        value = ACTIVATIONS[activation].value(x) if activation else x
        torch.testing.assert_close(found, plain.fake_quantize(value, scale, zero_point, *numbers), rtol=1e-5, atol=1e-5)
        grad, rest = torch.randn_like(x), (*numbers, "lsq", True, True, True)
        expected = with_activation(gradients.backward, grad, x, scale, zero_point, rest, activation)
        grads = kernels.backward(grad, x, scale, zero_point, *rest, activation)
        for one, other in zip(grads, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_parts", [2, 3])
@pytest.mark.parametrize("learns", [(True, True), (True, False), (False, False)], ids=["both", "scale", "none"])
def test_parts_of_one_tensor(
    device: str, num_parts: int, learns: tuple[bool, bool], request: pytest.FixtureRequest
) -> None:
    if device == "cpu":
        request.getfixturevalue("interpreted_kernels")
    kernels = importlib.import_module("sparsebit.kernels.stacked")
    x = torch.randn(2, 5, num_parts, 4, 6, device=device).permute(2, 0, 3, 1, 4)
    pieces, form = x.unbind(0), stack_form(x, 0)
    assert form == (10, 24)
    scales = [torch.tensor([sign * 0.2], device=device) for sign in (1.0, -1.0, 1.1)[:num_parts]]
    zero_points = [torch.tensor([float(place)], device=device) for place in range(num_parts)]
    found = kernels.forward(x, pieces, form, scales, zero_points, -8, 7)
    grads = [torch.randn_like(piece) for piece in found]
    grads[0] = grads[0].contiguous()  # in another order than the piece
    grad_x, *sums = kernels.backward(grads, x, pieces, form, scales, zero_points, -8, 7, (True, *learns))
    for place, piece in enumerate(pieces):
        numbers = (scales[place], zero_points[place], None, 0, -8, 7)
        assert torch.equal(found[place], plain.fake_quantize(piece, *numbers))
        expected = gradients.backward(grads[place], piece, *numbers, "lsq", True, *learns)
        assert torch.equal(grad_x[place], expected[0])
        for total, other in zip(sums, expected[1:], strict=True):
            assert (total is None) == (other is None)
            if total is not None:
                torch.testing.assert_close(total[place].sum().reshape(1), other, rtol=1e-4, atol=1e-5)
    assert grad_x.stride() == x.stride()


@pytest.mark.gpu
def test_division_is_exact_on_many_values() -> None:
    kernels = importlib.import_module("sparsebit.kernels.fake_quant")
    x, zero = torch.randn(1 << 24, device="cuda") * 3, torch.zeros((), device="cuda")
    for _ in range(8):
        scale = torch.rand((), device="cuda") * 0.1 + 1e-3
        numbers = (scale, zero, None, 0, -128, 127)
        assert torch.equal(kernels.fake_quantize(x, *numbers), plain.fake_quantize(x, *numbers))


@pytest.mark.gpu
def test_no_gradient_is_lost_in_long_channels() -> None:
    """The first Sparsebit's kernel lost what lay behind 1.3 million elements of a channel."""
    kernels = importlib.import_module("sparsebit.kernels.fake_quant")
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.full((4, 3, 1024, 1024), 100.0, device="cuda").contiguous(memory_format=layout)
        scale, zero_point = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
        _, grad_scale, _ = kernels.backward(
            torch.ones_like(x), x, scale, zero_point, 1, 0, 0, 15, "pact", True, True, False
        )
        assert grad_scale.tolist() == [15.0 * 4 * 1024 * 1024] * 3


@pytest.mark.gpu
@pytest.mark.slow
def test_more_elements_than_fit_into_32_bits() -> None:
    count = 2**31 + 4097
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    x = torch.full((count,), 0.3, dtype=torch.bfloat16, device="cuda").requires_grad_()
    scale = torch.tensor([0.25], device="cuda", requires_grad=True)
    y = fake_quantize(x, scale, torch.zeros(1, device="cuda"), TensorSpec(4, True), gradient="lsq")
    assert bool((y == 0.25).all())
    y.backward(torch.ones_like(y))
    assert x.grad is not None and bool((x.grad == 1).all())
    each = 1.0 - float(x.detach()[0]) / 0.25
    expected = each * count * (count * 7) ** -0.5
    assert scale.grad is not None and scale.grad.item() == pytest.approx(expected, rel=1e-3)


def test_numbers_that_are_expanded_are_read_one_by_one(kernels: ModuleType, device: str) -> None:
    x, scale, zero_point, numbers = case(torch.randn(4, 6, 5, 5), PerChannel(1), False, device)
    one = zero_point[:1].expand_as(zero_point)
    found = kernels.fake_quantize(x, scale, one, *numbers)
    assert torch.equal(found, plain.fake_quantize(x, scale, one.contiguous(), *numbers))
    arguments = (torch.randn_like(x), x, scale, one, *numbers, "lsq", True, True, False)
    for mine, other in zip(kernels.backward(*arguments), gradients.backward(*arguments), strict=True):
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
