"""fp8 layers as GPUs multiply them: beside the definition, which unpacks the weight."""

from __future__ import annotations

import pytest
import torch

from sparsebit.llm import FloatLinear
from sparsebit.llm.layers import float_weight
from sparsebit.llm.layers.float_weight import FloatWeight, round_to_floats, scaled_product
from sparsebit.llm.layers.input_kinds import SCHEMES, InputFormat
from sparsebit.llm.layers.input_rounding import InputRounding

TOKENS = InputRounding(SCHEMES["fp8"])
CONSTANT = InputRounding(InputFormat("fp8", dynamic=False), scale=0.01)


def weight(rows: int = 96, columns: int = 128, kind: str = "fp8") -> FloatWeight:
    torch.manual_seed(0)
    dense = 0.02 * torch.randn(rows, columns)
    return round_to_floats(dense, kind, search=False, stored=torch.bfloat16)  # type: ignore[arg-type]


def exact(x: torch.Tensor, layer: FloatLinear) -> torch.Tensor:
    assert layer.inputs is not None
    rounded = layer.inputs.rounded(x.float()).double()
    return torch.nn.functional.linear(rounded, layer.packed.dequantize(torch.float64))


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("shape", [(1, 128), (2, 3, 128), (40, 128)], ids=str)
def test_the_scaled_product_is_that_of_the_unpacked_weight(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).bfloat16()
    x.reshape(-1, 128)[0] = 0  # a token of zeros
    layer = FloatLinear(weight())
    found = scaled_product(x, layer.packed, TOKENS)
    assert found.dtype == torch.bfloat16 and found.shape == (*shape[:-1], 96)
    if x.any():
        assert difference(found, exact(x, layer)) < 4e-3  # bfloat16 of the result, and of the scales of tokens
    else:
        assert not found.any()


def test_the_scaled_product_with_a_constant_scale() -> None:
    x = torch.randn(5, 128).bfloat16()
    layer = FloatLinear(weight(), inputs=CONSTANT)
    assert difference(scaled_product(x, layer.packed, CONSTANT), exact(x, layer)) < 4e-3


def test_no_tokens() -> None:
    assert scaled_product(torch.empty(0, 5, 128).bfloat16(), weight(), TOKENS).shape == (0, 5, 96)


@pytest.mark.parametrize(
    ("given", "expected"), [(weight(), "scaled_mm"), (weight(40), "unpacked"), (weight(kind="mxfp4"), "unpacked")]
)
def test_which_weights_a_gpu_multiplies(given: FloatWeight, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    on_gpu = FloatWeight(
        given.kind, given.qweight.to("meta"), given.scales.to("meta"), given.divisor and given.divisor.to("meta")
    )
    assert FloatLinear(on_gpu).path == "unpacked"  # not a GPU
    monkeypatch.setattr(float_weight, "_is_nvidia", lambda device: True)
    assert FloatLinear(on_gpu).path == expected
    assert bool(FloatLinear(on_gpu).path_reason) == (expected == "unpacked")


def test_a_layer_with_a_scaled_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(float_weight, "_is_nvidia", lambda device: True)
    layer, bias = FloatLinear(weight()), torch.randn(96)
    with_bias = FloatLinear(weight(), bias)
    x = torch.randn(3, 128)
    assert difference(layer(x.bfloat16()), exact(x.bfloat16(), layer)) < 4e-3
    assert difference(with_bias(x.bfloat16()), exact(x.bfloat16(), layer) + bias) < 4e-3
    assert difference(layer(x), exact(x, layer)) < 1e-5  # float32 is not rounded to bfloat16
    trained = x.bfloat16().requires_grad_()
    layer(trained).sum().backward()
    assert trained.grad is not None
    layer.inputs = None
    dense = layer.packed.dequantize(torch.float64)
    assert difference(layer(x.bfloat16()), x.bfloat16().double() @ dense.t()) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 64, 300])
@pytest.mark.parametrize("inputs", [None, CONSTANT], ids=["tokens", "constant"])
def test_on_a_gpu(num_rows: int, inputs: InputRounding | None) -> None:
    layer = FloatLinear(weight(), inputs=inputs).to("cuda")
    if layer.path != "scaled_mm":
        pytest.skip("needs compute capability 9.0")
    x = torch.randn(num_rows, 128, device="cuda").bfloat16()
    assert difference(layer(x), exact(x, layer)) < 4e-3
    assert layer.to("cpu").path == "unpacked"
