from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import DeploymentError
from sparsebit.graph.state.modes import evaluating
from sparsebit.quantization import QuantModel, register_quantizer
from sparsebit.quantization.exporting.export_constants import ConstantSite, quantizers_as_constants
from sparsebit.quantization.ops.quant_opr import FunctionalWeightedQuantOpr
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.registry import QUANTIZERS
from tests.quantization.tiny import Residual, TwoLayers, calibrated, qconfig

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def kept_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantizers that a test registers are gone afterwards."""
    for name, value in vars(QUANTIZERS).items():
        if isinstance(value, dict):
            monkeypatch.setattr(QUANTIZERS, name, dict(value))


def snapshot(qmodel: QuantModel) -> tuple[Any, ...]:
    state = {name: value.clone() for name, value in qmodel.state_dict().items()}
    quantizers = [(quantizer.name, id(quantizer), quantizer.export_onnx) for quantizer in qmodel.quantizers()]
    return state, quantizers, [module.training for module in qmodel.modules()]


def assert_same(before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())
    assert before[1:] == after[1:]


@pytest.mark.parametrize("backend", ["virtual", "onnxruntime", "tensorrt"])
def test_inside_all_is_frozen_and_computes_the_same(backend: str) -> None:
    x = torch.randn(2, 3, 8, 8)
    qmodel = calibrated(Residual(), [x], qconfig(backend=backend)).eval()
    before = snapshot(qmodel)
    with torch.no_grad():
        expected = qmodel(x)
        with quantizers_as_constants(qmodel):
            found = qmodel(x)
            assert not any(quantizer.is_enable for quantizer in qmodel.quantizers())
            assert any(isinstance(module, ConstantSite) for module in qmodel.modules())
    assert torch.allclose(found, expected, atol=1e-5 * float(expected.abs().max()))
    assert_same(before, snapshot(qmodel))


def test_afterwards_all_is_as_before_also_after_a_fault() -> None:
    qmodel = calibrated(TwoLayers(), [X])
    qmodel.train()
    qmodel.model.first.eval()  # type: ignore[union-attr]
    before = snapshot(qmodel)

    def fails() -> None:
        with evaluating(qmodel), quantizers_as_constants(qmodel):
            assert not any(module.training for module in qmodel.modules())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert_same(before, snapshot(qmodel))


def test_quantizers_are_told_that_they_are_exported() -> None:
    qmodel = calibrated(TwoLayers(), [X])
    quantizers = [quantizer for quantizer in qmodel.quantizers() if quantizer.is_enable]
    with quantizers_as_constants(qmodel):
        assert all(quantizer.export_onnx for quantizer in quantizers)
    assert not any(quantizer.export_onnx for quantizer in quantizers)


class Halved(Quantizer):
    """Something in front of the grid."""

    def transform(self, x: Tensor) -> Tensor:
        return x * 0.5


class Rounded(Quantizer):
    """Its own rule for rounding, onto the same grid: what AdaRound does."""

    def fake_quantize(self, x: Tensor) -> Tensor:
        scale, _ = self.qparams()
        wide = scale.reshape(-1, *[1] * (x.ndim - 1)) if scale.ndim else scale
        return (x / wide).floor().clamp(self.spec.qmin, self.spec.qmax) * wide


class Powers(Quantizer):
    """No uniform grid at all."""

    def fake_quantize(self, x: Tensor) -> Tensor:
        return torch.sign(x) * 2.0 ** torch.round(torch.log2(x.abs() + 1e-6))


class Clipped(Quantizer):
    """Something of its own, then the grid."""

    def fake_quantize(self, x: Tensor) -> Tensor:
        return super().fake_quantize(x.clamp(-0.5, 0.5))


def own(kind: type[Quantizer], target: str) -> QuantModel:
    register_quantizer("own", replace=True)(kind)
    return calibrated(TwoLayers(), [X], qconfig({f"{target}.QUANTIZER.TYPE": "own"}, bits=4)).eval()


@pytest.mark.parametrize("kind", [Halved, Rounded, Clipped])
def test_weights_of_a_users_quantizer_are_what_it_gives(kind: type[Quantizer]) -> None:
    qmodel = own(kind, "W")
    with torch.no_grad():
        expected = qmodel(X)
        with quantizers_as_constants(qmodel):
            assert torch.allclose(qmodel(X), expected, atol=1e-6)


def test_weights_off_the_grid_are_refused() -> None:
    qmodel = own(Powers, "W")
    before = snapshot(qmodel)
    with (
        pytest.raises(DeploymentError, match=r"first\.weight: the quantizer 'own' returns weights off the grid"),
        quantizers_as_constants(qmodel),
    ):
        pass
    assert_same(before, snapshot(qmodel))


@pytest.mark.parametrize("kind", [Halved, Powers, Clipped])
def test_activations_of_a_users_quantizer_are_what_it_gives(kind: type[Quantizer]) -> None:
    qmodel = own(kind, "A")
    with torch.no_grad():
        expected = qmodel(X)
        with quantizers_as_constants(qmodel):
            assert torch.equal(qmodel(X), expected)


def test_a_disabled_quantizer_stays_out() -> None:
    qmodel = calibrated(TwoLayers(), [X])
    qmodel.set_quant(w_quant=True, a_quant=False)
    with quantizers_as_constants(qmodel):
        names = {module.name for module in qmodel.modules() if isinstance(module, ConstantSite)}
    assert names == {"first.weight", "second.weight"}


def test_numbers_pass_that_are_no_floats() -> None:
    site = ConstantSite("ids", torch.ones(()), torch.zeros(()), (None, 0, 0, 255))
    ids = torch.tensor([1, 300])
    assert site(ids) is ids and site(3) == 3


def test_evaluating_keeps_each_mode() -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3))
    model.train()
    model[1].eval()
    call: Callable[[], list[bool]] = lambda: [module.training for module in model.modules()]  # noqa: E731
    with evaluating(model):
        assert call() == [False, False, False]
    assert call() == [True, True, False]


class Standardized(nn.Conv2d):
    """As timm's ScaledStdConv2d does it."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, len(self.weight), -1)
        weight = F.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


def test_a_computed_weight_has_the_codes_of_the_simulation(tmp_path: Path) -> None:
    """ONNX has the same operations, but sums in another order: of half a million weights a few rounded elsewhere."""
    torch.manual_seed(0)
    x = torch.randn(1, 256, 2, 2)
    qmodel = calibrated(nn.Sequential(Standardized(256, 256, 3, padding=1)), [x], qconfig(backend="onnxruntime"))
    layer = next(m for m in qmodel.model.modules() if isinstance(m, FunctionalWeightedQuantOpr))
    computed: list[Tensor] = []
    handle = layer.weight_quantizer.register_forward_hook(lambda module, args, output: computed.append(output))
    with torch.no_grad():
        qmodel(x)
    handle.remove()
    qmodel.export_onnx(x, tmp_path / "model.onnx")
    stored = {tensor.name: tensor for tensor in onnx.load(str(tmp_path / "model.onnx")).graph.initializer}
    (name,) = (name for name in stored if name.endswith("weight/codes"))
    codes = torch.from_numpy(onnx.numpy_helper.to_array(stored[name]).copy()).float()
    scale = layer.weight_quantizer.scale.detach().reshape(-1, 1, 1, 1)
    assert torch.equal(codes, (computed[-1] / scale).round())


def test_a_weight_that_an_input_changes_is_no_constant() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(4, 3, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, self.kernel * x.mean())

    x = torch.randn(2, 3, 4, 4)
    qmodel = calibrated(Mixed(), [x])
    with torch.no_grad():
        expected = qmodel(2 * x)
        with quantizers_as_constants(qmodel):
            torch.testing.assert_close(qmodel(2 * x), expected)


def test_a_weight_that_is_written_in_the_graph_is_no_constant() -> None:
    class Grows(nn.Module):
        kernel: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kernel", torch.randn(4, 3, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            self.kernel.mul_(1.25)
            return F.conv2d(x, self.kernel * 1)

    x = torch.randn(2, 3, 4, 4)
    qmodel = calibrated(Grows(), [x])
    kernel = next(value for name, value in qmodel.named_buffers() if name.endswith("kernel"))
    before = kernel.clone()
    with torch.no_grad():
        expected = qmodel(x)
        kernel.copy_(before)
        with quantizers_as_constants(qmodel):
            assert torch.equal(kernel, before)
            torch.testing.assert_close(qmodel(x), expected)
