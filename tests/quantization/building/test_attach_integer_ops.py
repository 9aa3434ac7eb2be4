from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsebit
from sparsebit.deploy.audit.audit_file import audit
from sparsebit.deploy.comparing.float_twin import float_twin
from sparsebit.quantization import QuantModel
from sparsebit.quantization.ops.integer_ops import IntegerAdd, IntegerProduct
from sparsebit.quantization.ops.quant_opr import FunctionalWeightedQuantOpr, GatedQuantOpr, QShared, WeightedQuantOpr
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.registration import register_quantizer
from sparsebit.registry import QUANTIZERS
from tests.deploy.exported_files import optimized_ops
from tests.quantization.tiny import calibrated, qconfig, site, sites

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A convolution + SiLU, a max pool whose output two convolutions read (no one could compute both), an add."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.silu(self.stem(x)), 2)
        return self.left(x) + self.right(x)


def layers(qmodel: QuantModel, kind: type[nn.Module]) -> list[nn.Module]:
    return [module for module in qmodel.model.modules() if isinstance(module, kind)]


def test_everything_runs_in_integers_and_bit_by_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    qmodel = calibrated(Net(), [X], qconfig({"A.OBSERVER.TYPE": "mse"}, backend="onnxruntime"))
    parity = qmodel.export_onnx(X, tmp_path / "m.onnx", check=[X])
    assert parity is not None and parity.is_exact
    ops = optimized_ops(tmp_path / "m.onnx", tmp_path)
    assert ops["QLinearConv"] == 3 and ops["QLinearSigmoid"] == ops["QLinearMul"] == ops["QLinearAdd"] == 1
    assert ops["QuantizeLinear"] == 1  # the input's alone


class HardSwished(nn.Module):
    """No sum of two products clips at 16 bits here: the file is exact on processors without VNNI too."""

    def __init__(self, *, inplace: bool = False) -> None:
        super().__init__()
        self.stem, self.act, self.last = nn.Conv2d(1, 8, 1), nn.Hardswish(inplace), nn.Conv2d(8, 8, 3, groups=8)
        with torch.no_grad():
            self.stem.weight.mul_(4)  # both ends of the gate are reached

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.stem(x)))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_hard_swish_runs_in_integers_and_bit_by_bit(inplace: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 1, 12, 12)
    qmodel = sparsebit.quantize(HardSwished(inplace=inplace).eval(), [x], "onnxruntime")
    parity = qmodel.export_onnx(x[:1], tmp_path / "m.onnx", check=[x])
    assert parity is not None and parity.is_exact
    ops = optimized_ops(tmp_path / "m.onnx", tmp_path)
    assert ops["QLinearConv"] == 2 and ops["QLinearAdd"] == ops["QLinearMul"] == 1
    assert ops["QuantizeLinear"] == ops["DequantizeLinear"] == 1 and not ops["HardSigmoid"]


def test_a_hard_swish_whose_gate_would_not_saturate_right_stays_as_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 1, 12, 12)
    config = qconfig({"A.QSCHEME": "per-tensor-symmetric"}, backend="onnxruntime")
    with pytest.warns(UserWarning, match="int8 activations run slower"):
        qmodel = calibrated(HardSwished(), [x], config)
    parity = qmodel.export_onnx(x[:1], tmp_path / "m.onnx", check=[x])
    assert parity is not None and parity.worst.max_difference < 1e-3
    assert optimized_ops(tmp_path / "m.onnx", tmp_path)["HardSigmoid"] == 1


def test_the_float_twin_of_a_hard_swish_computes_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 1, 12, 12)
    qmodel = sparsebit.quantize(HardSwished().eval(), [x], "onnxruntime")
    qmodel.export_onnx(x, tmp_path / "m.onnx")
    twin = float_twin(tmp_path / "m.onnx")
    assert [node.op_type for node in twin.graph.node].count("HardSigmoid") == 1
    session = sparsebit.open_session(twin.SerializeToString())
    found = torch.from_numpy(session.run({session.inputs[0]: x.numpy()})[0])
    expected = qmodel(x)
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_a_max_pool_keeps_its_input_s_grid() -> None:
    qmodel = calibrated(Net(), [X], qconfig(backend="onnxruntime"))
    (shared,) = layers(qmodel, QShared)
    assert isinstance(shared, QShared) and shared.input_quantizer is site(qmodel, "silu.output")
    assert "max_pool2d.shared" not in sites(qmodel)


def test_a_consumer_with_another_format_has_its_own_quantizer() -> None:
    config = qconfig({"A.SPECIFIC": [{"left": ["QSCHEME", "per-tensor-symmetric"]}]}, backend="onnxruntime")
    qmodel = calibrated(Net(), [X], config)
    assert "left.input" in sites(qmodel) and site(qmodel, "left.input").spec.symmetric


def test_the_gate_of_a_silu_is_quantized_for_onnxruntime_only() -> None:
    assert "silu.gate" in sites(calibrated(Net(), [X], qconfig(backend="onnxruntime")))
    for backend in ("openvino", "tensorrt", "virtual"):
        assert not layers(calibrated(Net(), [X], qconfig(backend=backend)), GatedQuantOpr)


@pytest.mark.parametrize(
    ("backend", "rounds", "is_exact"),
    [("onnxruntime", True, True), ("executorch", True, True), ("openvino", True, False)],
)
def test_biases_and_kernels_follow_the_profile(backend: str, rounds: bool, is_exact: bool) -> None:
    qmodel = calibrated(Net(), [X], qconfig(backend=backend))
    for layer in layers(qmodel, WeightedQuantOpr):
        assert isinstance(layer, WeightedQuantOpr)
        assert (layer.bias_rounding is not None) == rounds and (layer.integer is not None) == is_exact
    assert bool(layers(qmodel, IntegerAdd)) == is_exact


@pytest.mark.parametrize("backend", ["virtual", "tensorrt"])
def test_float_biases_stay(backend: str) -> None:
    qmodel = calibrated(Net(), [X], qconfig(backend=backend))
    assert all(layer.bias_rounding is None for layer in layers(qmodel, WeightedQuantOpr))


def test_a_user_s_own_rounding_is_not_taken_for_the_grid() -> None:
    @register_quantizer("doubled")
    class Doubled(Quantizer):
        def fake_quantize(self, x: Tensor) -> Tensor:
            return 2 * super().fake_quantize(x)

    try:
        config = qconfig({"A.QUANTIZER.TYPE": "doubled"}, backend="onnxruntime")
        qmodel = calibrated(Net(), [X], config)
        assert all(layer.integer is None for layer in layers(qmodel, WeightedQuantOpr))
    finally:
        QUANTIZERS._entries.pop("doubled")


def test_a_sum_beyond_float32_is_exact_too(tmp_path: Path) -> None:
    """4,096 products of large codes with one sign: more than 2^24."""
    torch.manual_seed(0)
    linear = nn.Linear(4096, 64)
    with torch.no_grad():
        linear.weight.abs_().add_(0.05)
    x = torch.rand(8, 4096)
    qmodel = calibrated(nn.Sequential(linear), [x], qconfig(backend="onnxruntime"))
    parity = qmodel.export_onnx(x, tmp_path / "m.onnx", check=[x])
    assert parity is not None and parity.worst.sqnr_db > 140  # the outputs themselves are float32; 131 in float32 sums


def test_under_autocast_the_plain_ops_run() -> None:
    qmodel = calibrated(Net(), [X], qconfig(backend="onnxruntime"))
    with torch.no_grad():
        exact = qmodel(X)
        with torch.autocast("cpu", torch.bfloat16):
            rough = qmodel(X)
    assert rough.dtype == torch.bfloat16
    assert 0 < float((rough.float() - exact).norm() / exact.norm()) < 0.05


def test_tuned_batch_norms_leave_integer_biases(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    config = qconfig({"SCHEDULE.BN_TUNING": True}, backend="onnxruntime")
    qmodel = calibrated(model, [X], config)
    with qmodel.batchnorm_tuning(), torch.no_grad():
        qmodel(X)
    qmodel.set_quant(w_quant=True, a_quant=True)
    parity = qmodel.export_onnx(X, tmp_path / "m.onnx", check=[X])
    assert parity is not None and parity.worst.max_difference <= 1e-6


class Functional(nn.Module):
    """A convolution, a function with its weight and bias as arguments, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)
        self.kernel, self.matrix = nn.Parameter(torch.randn(8, 8, 3, 3)), nn.Parameter(torch.randn(8, 8))
        self.bias, self.maker = nn.Parameter(torch.randn(8)), nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.function(torch.relu(self.stem(x)))))


class ComputedKernel(Functional):
    def function(self, x: Tensor) -> Tensor:
        kernel = self.kernel / self.kernel.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, kernel, self.bias * 2, padding=1).mean((2, 3))


class NamedMatrix(Functional):
    def function(self, x: Tensor) -> Tensor:
        return F.linear(bias=self.bias, weight=torch.tanh(self.matrix), input=x.mean((2, 3)))


class TransposedMatrix(Functional):
    def function(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.mean((2, 3)), self.matrix)


class KernelOfTheInput(Functional):
    def function(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.maker(x.mean((0, 2, 3))).view(8, 8, 1, 1), self.bias).mean((2, 3))


class MatrixOfTheInput(Functional):
    def function(self, x: Tensor) -> Tensor:
        x = x.mean((2, 3))
        return F.linear(x, self.maker(x.mean(0)).view(8, 8), self.bias)


class WithoutBias(Functional):
    def function(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel * 2).mean((2, 3))


class WithBias(Functional):
    def function(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel * 2, self.bias).mean((2, 3))


class BiasOfTheInput(Functional):
    def function(self, x: Tensor) -> Tensor:
        x = x.mean((2, 3))
        return F.linear(x, self.matrix * 2, self.maker(x.mean(0))[:8])


class FactorOfTheBias(Functional):
    def function(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.mean((2, 3)), self.matrix, beta=0.5)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "kind",
    [ComputedKernel, NamedMatrix, TransposedMatrix, KernelOfTheInput, MatrixOfTheInput, WithoutBias],
    ids=lambda kind: kind.__name__,
)
@pytest.mark.exact_sums
def test_functions_run_in_integers_and_bit_by_bit(kind: type[Functional], tmp_path: Path) -> None:
    torch.manual_seed(0)
    qmodel = calibrated(kind(), [X], qconfig(backend="onnxruntime"))
    parity = qmodel.export_onnx(X, tmp_path / "m.onnx", check=[X])
    assert parity is not None and parity.is_exact
    assert set(audit(tmp_path / "m.onnx", repeats=0).counts()) == {"integer"}
    (layer,) = layers(qmodel, FunctionalWeightedQuantOpr)
    assert isinstance(layer, FunctionalWeightedQuantOpr) and (layer.bias_rounding is None) == (kind is WithoutBias)


@pytest.mark.parametrize("kind", [BiasOfTheInput, FactorOfTheBias], ids=lambda kind: kind.__name__)
def test_a_bias_that_the_file_cannot_hold_stays_float(kind: type[Functional], tmp_path: Path) -> None:
    torch.manual_seed(0)
    qmodel = calibrated(kind(), [X], qconfig(backend="onnxruntime"))
    (layer,) = layers(qmodel, FunctionalWeightedQuantOpr)
    assert isinstance(layer, FunctionalWeightedQuantOpr) and layer.integer is layer.bias_rounding is None
    parity = qmodel.export_onnx(X, tmp_path / "m.onnx", check=[X])
    assert parity is not None and parity.is_exact


def test_a_function_s_dead_channel_has_room_for_its_bias() -> None:
    torch.manual_seed(0)
    model = WithBias()
    with torch.no_grad():
        model.bias.fill_(100.0)
        model.kernel[0] *= 1e-9
    qmodel = calibrated(model, [X], qconfig(backend="onnxruntime"))
    (layer,) = layers(qmodel, FunctionalWeightedQuantOpr)
    assert isinstance(layer, FunctionalWeightedQuantOpr) and layer.bias_rounding is not None
    rounded = layer.bias_rounding(model.bias)
    assert torch.allclose(rounded, model.bias, rtol=1e-5)


def test_a_function_s_gradients_are_those_of_the_plain_op() -> None:
    torch.manual_seed(0)
    qmodel = calibrated(NamedMatrix(), [X], qconfig(backend="onnxruntime")).eval()
    with torch.no_grad():
        exact = qmodel(X)
    output = qmodel(X)
    assert torch.allclose(output, exact, rtol=1e-5, atol=1e-6)
    output.sum().backward()
    gradients = {name: p.grad for name, p in qmodel.named_parameters() if name in ("model.matrix", "model.bias")}
    assert len(gradients) == 2
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients.values())


class Squeezed(nn.Module):
    """Squeeze and excitation, with the gate on either side of the product."""

    def __init__(self, gate_first: bool) -> None:
        super().__init__()
        self.gate_first = gate_first
        self.stem, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        gate = F.hardsigmoid(self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu()))
        return self.last(gate * x if self.gate_first else x * gate)


@pytest.mark.parametrize("gate_first", [True, False])
def test_the_product_of_squeeze_and_excitation_is_that_of_the_kernel(gate_first: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 3, 10, 10)
    qmodel = sparsebit.quantize(Squeezed(gate_first).eval(), [batch], "onnxruntime")
    assert any(isinstance(module, IntegerProduct) for module in qmodel.modules())
    parity = qmodel.export_onnx(batch[:1], tmp_path / "gated.onnx", check=[batch])
    assert parity is not None and parity.worst.max_difference == 0
    x = batch[:1].clone().requires_grad_()
    qmodel(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
