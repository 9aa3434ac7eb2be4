from __future__ import annotations

import json
import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sparsebit
from sparsebit.quantization import QuantModel
from tests.quantization.tiny import Opaque, Residual, calibrated, qconfig


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.middle, self.tail = nn.Linear(6, 6), Opaque(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + 1
        return self.tail(torch.erf(self.middle(self.front(x))))


def test_what_is_quantized_with_its_formats() -> None:
    coverage = QuantModel(Residual(), qconfig({"A.QADD.ENABLE_QUANT": True, "W.QUANTIZER.BIT": 4})).coverage
    layers = {layer.name: layer for layer in coverage.quantized}
    assert layers["stem.conv"].op == "QConv2d"
    assert layers["stem.conv"].sites == {"input": "uint8", "weight": "int4"}
    assert layers["stem.relu"].sites == {"shared": "uint8"}
    assert layers["add"].sites == {"input.0": "uint8"}
    assert (coverage.num_weighted_quantized, coverage.num_weighted, coverage.weighted_fraction) == (3, 3, 1.0)


def test_text() -> None:
    text = str(QuantModel(Mixed(), qconfig()).coverage)
    lines = text.splitlines()
    assert lines[0] == "4 of 4 weighted layers quantized, 4 layers in all"
    assert "  float    erf: unknown op erf: passes through in float (register it with register_qmodule)" in lines
    (untraced,) = [line for line in lines if line.startswith("  untraced")]
    assert untraced.startswith("  untraced middle [Opaque]: ")
    assert any("tiny.py:" in line and "float(x.abs().max())" in line for line in lines)
    assert "           quantized inside: middle.first, middle.second" in lines
    assert any(line.startswith("  note     (model) branches on self.training") for line in lines)


def test_dict_goes_to_json() -> None:
    coverage = calibrated(Mixed(), [torch.randn(4, 6)]).coverage
    values = json.loads(json.dumps(coverage.to_dict()))
    assert values["weighted_fraction"] == 1.0
    assert {layer["name"] for layer in values["quantized"]} == {"front", "middle.first", "middle.second", "tail"}
    assert values["opaque"][0]["quantized_inside"] == ["middle.first", "middle.second"]


def test_an_opaque_model_says_so_at_its_root() -> None:
    (module,) = QuantModel(Opaque(), qconfig()).coverage.opaque
    assert module.path == "" and module.quantized_inside == ("first", "second")
    assert "untraced (model) [Opaque]" in str(QuantModel(Opaque(), qconfig()).coverage)


def test_a_model_without_weights() -> None:
    coverage = QuantModel(nn.Sequential(nn.ReLU()), qconfig()).coverage
    assert coverage.num_weighted == 0 and coverage.weighted_fraction == 0.0


class Complex(nn.Module):
    """A transform, a complex layer in between, and real layers around them."""

    def __init__(self, opaque: bool = False) -> None:
        super().__init__()
        self.opaque = opaque
        self.front, self.tail = nn.Linear(8, 8), nn.Linear(8, 3)
        self.middle = nn.Linear(8, 8, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        if self.opaque and float(x.detach().sum()) == 0.5:
            return x
        return self.tail(torch.fft.ifft(self.middle(torch.fft.fft(x))).real)


@pytest.mark.parametrize("opaque", [False, True])
def test_complex_layers_are_float_and_say_why(opaque: bool) -> None:
    torch.manual_seed(0)
    model, x = Complex(opaque).eval(), torch.randn(4, 8)
    qmodel = calibrated(model, [x])
    coverage = qmodel.coverage
    assert "middle" not in {layer.name for layer in coverage.quantized}
    assert (coverage.num_weighted_quantized, coverage.num_weighted) == (2, 3)
    assert {layer.name: layer.reason for layer in coverage.float_layers}["middle"].startswith(
        "it computes with complex"
    )
    assert {p.name for p in coverage.parameters if "complex" in p.format} == {"middle.weight", "middle.bias"}
    assert not any(p.is_quantized for p in coverage.parameters if p.name.startswith("middle"))
    qmodel.set_quant()
    assert torch.equal(qmodel(x), model(x))


def test_a_complex_parameter_of_a_function_is_float() -> None:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.ifft(nn.functional.linear(torch.fft.fft(x), self.factors)).real

    coverage = calibrated(Filter().eval(), [torch.randn(4, 8)]).coverage
    assert coverage.parameter_fraction == 0.0 and not coverage.quantized
    assert coverage.num_weighted_quantized == 0


def test_every_parameter_has_a_line() -> None:
    qmodel = calibrated(Residual().eval(), [torch.randn(2, 3, 8, 8)])
    parameters = qmodel.coverage.parameters
    assert sum(p.num_elements for p in parameters) == sum(p.numel() for p in qmodel.parameters())
    assert all(bool(p.reason) != p.is_quantized for p in parameters)
    weight = next(p for p in parameters if p.name == "stem.conv.weight")
    assert weight.format == "int8" and weight.bytes < weight.float_bytes


def test_tied_parameters_count_once() -> None:
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.ReLU(), nn.Linear(5, 5, bias=False))
    model[2].weight = model[0].weight
    assert [p.name for p in QuantModel(model, qconfig()).coverage.parameters] == ["0.weight"]


def test_parametrized_and_computed_weights_are_not_counted_as_float() -> None:
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)))
    coverage = QuantModel(model, qconfig()).coverage
    assert {p.name: p.is_quantized for p in coverage.parameters if "original" in p.name} == {
        "0.parametrizations.weight.original0": True,
        "0.parametrizations.weight.original1": True,
    }


def test_float_parameters_have_the_reason_of_what_keeps_them_float() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.EmbeddingBag(4, 5), nn.LayerNorm(6))
    coverage = QuantModel(nn.Sequential(model[0], model[2]), qconfig({"SKIP_TRACE_MODULES": ["0"]})).coverage
    reasons = {p.name: p.reason for p in coverage.parameters}
    assert reasons["0.weight"] == "SKIP_TRACE_MODULES keeps it in float"
    assert reasons["1.weight"].startswith("biases, norms")
    (bag,) = QuantModel(nn.Sequential(model[1]), qconfig()).coverage.parameters
    assert bag.reason == "embedding bags run in float"


@pytest.mark.parametrize(("write", "is_told"), [
    (lambda x: x.data.neg_(), True), (lambda x: x.data[:, :2].mul_(2), True),
    (lambda x: operator.iadd(x.data, 1), True), (lambda x: x.repeat(1, 1).data.relu_(), True),
    (lambda x: x.detach().neg_(), False), (lambda x: x.data.neg(), False),
])  # fmt: skip
def test_a_write_that_autograd_does_not_see_is_told(write: Callable[[Tensor], Tensor], is_told: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            write(x)
            return y

    notes = " ".join(QuantModel(Net(), qconfig(bits=8)).coverage.notes)
    assert ("writes through .data" in notes) == is_told


@pytest.mark.slow
def test_a_cache_of_generated_tokens_is_named_with_what_to_do() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16)
    model, batch = transformers.GPT2LMHeadModel(config).eval(), {"input_ids": torch.arange(8)[None]}
    virtual = "{BACKEND: virtual, DEVICE: cpu, W: {QUANTIZER: {BIT: 8}}, A: {QUANTIZER: {BIT: 8}}}"
    said = str(sparsebit.quantize(model, [batch], virtual).coverage)
    assert "use_cache=False" in said and "never saw a float tensor" in said and "QUANTIZER.DISABLE" not in said
    model.config.use_cache = False
    assert "7 of 7 weighted layers quantized" in str(sparsebit.quantize(model, [batch], virtual).coverage)
