from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsebit
from sparsebit.errors import CalibrationError, CaptureError, CheckpointError, ConfigError
from sparsebit.quantization import QuantModel, correct_biases, equalize, gptq, reconstruct, sensitivity
from sparsebit.quantization.quant_config import as_qconfig
from tests.quantization.tiny import MaskFirst, Residual, TwoLayers, masked_batches, qconfig, site

YAML = "{DEVICE: cpu, W: {QUANTIZER: {BIT: 4}}, A: {QUANTIZER: {BIT: 8}}}"
X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "batches",
    [X, [X[:4], X[4:]], [(X,)], [(X, torch.zeros(12))], {"x": X}, [{"x": X[:6]}, {"x": X[6:]}], iter([X])],
    ids=["tensor", "tensors", "tuples", "tuples with labels", "dict", "dicts", "iterator"],
)
def test_batches_in_any_form(batches: Any) -> None:
    qmodel = sparsebit.quantize(TwoLayers(), batches, qconfig())
    assert qmodel.is_quantized("weight") and qmodel.is_quantized("activation") and not qmodel.training
    assert site(qmodel, "first.input").scale == pytest.approx(float((X.max() - X.min()) / 255))


def test_loader_of_images_and_labels() -> None:
    loader = DataLoader(TensorDataset(torch.randn(10, 3, 8, 8), torch.zeros(10)), batch_size=4)
    assert sparsebit.quantize(Residual(), loader, "onnxruntime")(torch.randn(2, 3, 8, 8)).shape == (2, 5)


@pytest.mark.parametrize("backend", ["virtual", "onnxruntime", "TensorRT", "openvino"])
def test_a_backends_name_is_config_enough(backend: str) -> None:
    model, x = Residual().eval(), torch.randn(4, 3, 8, 8)
    qmodel = sparsebit.quantize(model, [x], backend)
    assert backend.lower() == qmodel.config.BACKEND
    assert not any(isinstance(module, nn.BatchNorm2d) for module in qmodel.modules())
    torch.testing.assert_close(qmodel(x), model(x), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("form", ["path", "text", "dict", "config"])
def test_configs_in_any_form(form: str, tmp_path: Path) -> None:
    (tmp_path / "q.yaml").write_text(YAML)
    config: Any = {"path": tmp_path / "q.yaml", "text": YAML, "config": as_qconfig(YAML)}.get(form)
    if form == "dict":
        config = {"DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": 4}}, "A": {"QUANTIZER": {"BIT": 8}}}
    assert site(sparsebit.quantize(TwoLayers(), [X], config), "first.weight").spec.bits == 4
    if form == "path":
        assert sparsebit.quantize(TwoLayers(), [X], str(config)).config.W.QUANTIZER.BIT == 4


def test_asym() -> None:
    model = TwoLayers()
    plain, asym = (sparsebit.quantize(model, X.split(4), qconfig(bits=2), asym=asym) for asym in (False, True))
    assert site(plain, "second.input").scale != site(asym, "second.input").scale


def test_the_first_batch_shows_how_the_model_is_called() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return torch.sigmoid(x) if mask is None else torch.sigmoid(x) * mask

    batch = {"x": torch.randn(3), "mask": torch.rand(3)}
    assert {q.name for q in sparsebit.quantize(Masked(), [batch], qconfig()).quantizers()} == {
        *("sigmoid.input", "mul.input.0", "mul.input.1")
    }


@pytest.mark.parametrize("empty", [[], iter(()), ()], ids=["list", "iterator", "tuple"])
def test_no_batches(empty: Any) -> None:
    with pytest.raises(CalibrationError, match="no calibration batches were given"):
        sparsebit.quantize(TwoLayers(), empty, qconfig())


@pytest.mark.parametrize(("batches", "kind"), [(3, "int")])
def test_what_is_no_data(batches: Any, kind: str) -> None:
    with pytest.raises(CalibrationError, match=f"data of type {kind} is not iterable; pass a DataLoader"):
        sparsebit.quantize(TwoLayers(), batches, qconfig())


def test_what_is_no_batch() -> None:
    with pytest.raises(CalibrationError, match="a batch of type str cannot be fed to the model"):
        sparsebit.quantize(TwoLayers(), ["images"], qconfig())


@pytest.mark.parametrize("name", ["onnxrutime", "onnxrt", "ONNX-Runtime"])
def test_an_unknown_backend_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match="did you mean onnxruntime"):
        sparsebit.quantize(TwoLayers(), [X], name)


class TestWithoutData:
    @pytest.mark.parametrize("config", ["weights-only", "virtual-weights-only", "OpenVINO-weights-only"])
    def test_weights_only(self, config: str) -> None:
        model = Residual().eval()
        qmodel = sparsebit.quantize(model, config=config)
        assert qmodel.is_quantized("weight") and not qmodel.is_quantized("activation") and not qmodel.training
        x = torch.randn(2, 3, 8, 8)
        assert not torch.equal(qmodel(x), model(x))
        torch.testing.assert_close(qmodel(x), model(x), atol=0.05, rtol=0.05)

    def test_is_what_calibration_gives(self) -> None:
        model, config = Residual().eval(), qconfig({"A.QUANTIZER.DISABLE": True}, bits=4)
        x = torch.randn(8, 3, 8, 8)
        without, with_data = sparsebit.quantize(model, config=config), sparsebit.quantize(model, [x], config)
        assert torch.equal(without(x), with_data(x))

    @pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
    def test_exports(self, backend: str, tmp_path: Path) -> None:
        qmodel = sparsebit.quantize(Residual().eval(), config=f"{backend}-weights-only")
        x = torch.randn(2, 3, 8, 8)
        parity = qmodel.export_onnx(x, tmp_path / "model.onnx", check=[x])
        assert parity is not None

    def test_activations_need_data(self) -> None:
        with pytest.raises(CalibrationError, match=r"ranges are found on data \(.*weights-only"):
            sparsebit.quantize(TwoLayers(), config=qconfig())

    def test_computed_weights_need_data(self) -> None:
        class Computed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(3, 4))

            def forward(self, x: Tensor) -> Tensor:
                return torch.nn.functional.linear(x, self.weight * x.mean())

        with pytest.raises(CalibrationError, match="computed in the forward, so pass one batch"):
            sparsebit.quantize(Computed(), config="virtual-weights-only")


@pytest.mark.parametrize(("num_samples", "is_told"), [(7, True), (8, False)])
def test_few_samples_are_told(num_samples: int, is_told: bool, caplog: pytest.LogCaptureFixture) -> None:
    sparsebit.quantize(TwoLayers(), X[:num_samples].split(2), qconfig())
    assert ("calibrated on 7 samples" in caplog.text) is is_told


def test_samples_are_counted_where_the_first_argument_has_none(caplog: pytest.LogCaptureFixture) -> None:
    sparsebit.quantize(MaskFirst(), masked_batches(first=True, num_batches=1), qconfig())
    assert "calibrated on 4 samples" in caplog.text


@pytest.mark.parametrize("form", ["itself", "inside"])
def test_a_quantized_model_is_refused(form: str) -> None:
    qmodel = sparsebit.quantize(TwoLayers(), [X], qconfig())
    with pytest.raises(CaptureError, match="a QuantModel, which is quantized already; give the float model"):
        sparsebit.quantize(qmodel if form == "itself" else nn.Sequential(qmodel), [X], qconfig())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="DEVICE=cuda:1: torch sees no GPU here; set DEVICE: cpu"):
        sparsebit.quantize(TwoLayers(), [X], qconfig().replace("DEVICE", "cuda:1"))


def test_the_model_is_left_as_it_was() -> None:
    model = TwoLayers().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sparsebit.quantize(model, [X], qconfig(bits=2))
    assert model.training and all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_model_that_was_saved_on_a_gpu(tmp_path: Path) -> None:
    sparsebit.quantize(TwoLayers(), [X], qconfig()).save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r'DEVICE=cuda: torch sees no GPU.*QuantModel.load\(..., device="cpu"\)'):
        QuantModel.load(tmp_path / "saved", TwoLayers(), device="cuda")
    assert QuantModel.load(tmp_path / "saved", TwoLayers(), device="cpu").device.type == "cpu"


def test_a_folder_to_resume_from_without_algorithms_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the config names none"):
        sparsebit.quantize(TwoLayers(), [X], qconfig(), resume=tmp_path / "kept")
    sparsebit.quantize(TwoLayers(), [X], qconfig(), effort="good", resume=tmp_path / "kept")  # 8 bits: nothing to do


def train(qmodel: QuantModel) -> None:
    qmodel.train()
    qmodel(torch.randn(8, 6)).square().mean().backward()


AFTERWARDS: dict[str, Callable[[QuantModel, list[Tensor]], object]] = {
    "nothing": lambda qmodel, data: None,
    "reconstruct": lambda qmodel, data: reconstruct(qmodel, data, steps=4),
    "gptq": lambda qmodel, data: gptq(qmodel, data),
    "equalize": lambda qmodel, data: equalize(qmodel, data),
    "correct_biases": lambda qmodel, data: correct_biases(qmodel, data),
    "sensitivity": lambda qmodel, data: sensitivity(qmodel, data),
    "train": lambda qmodel, data: train(qmodel),
}


class TestInferenceMode:
    """Tensors that are made in it take no gradient: the model, the data, and what is made by the calls."""

    @pytest.mark.parametrize("name", AFTERWARDS)
    def test_model_data_and_calibration(self, name: str) -> None:
        with torch.inference_mode():
            torch.manual_seed(0)
            model, data = TwoLayers(), [torch.randn(16, 6)]
            qmodel = sparsebit.quantize(model, data, qconfig(bits=4))
        AFTERWARDS[name](qmodel, data)
        torch.manual_seed(0)
        same = sparsebit.quantize(TwoLayers(), [torch.randn(16, 6)], qconfig(bits=4))
        AFTERWARDS[name](same, data)
        qmodel.eval(), same.eval()
        with torch.no_grad():
            assert torch.equal(qmodel(data[0]), same(data[0]))

    @pytest.mark.parametrize("name", [name for name in AFTERWARDS if name != "train"])
    def test_a_call_in_it(self, name: str) -> None:
        data = [torch.randn(16, 6)]
        qmodel = sparsebit.quantize(TwoLayers(), data, qconfig(bits=4))
        with torch.inference_mode():
            AFTERWARDS[name](qmodel, data)
        train(qmodel)

    @pytest.mark.slow
    @pytest.mark.parametrize("effort", ["good", "best"])
    def test_efforts(self, effort: Any) -> None:
        with torch.inference_mode():
            model, data = TwoLayers(), [torch.randn(16, 6)]
        train(sparsebit.quantize(model, data, qconfig(bits=4), effort=effort))

    def test_an_example(self) -> None:
        with torch.inference_mode():
            model, x = TwoLayers(), torch.randn(16, 6)
        train(QuantModel(model, qconfig(), example_inputs=x))
