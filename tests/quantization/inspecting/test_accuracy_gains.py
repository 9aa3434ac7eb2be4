"""The accuracy that comes back with one layer in float."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.quantization import QuantModel, gptq
from sparsebit.quantization.inspecting.accuracy_gains import FloatLayers
from sparsebit.quantization.inspecting.class_scores import LABELS
from tests.quantization.tiny import Residual, TwoLayers, calibrated, qconfig


@pytest.fixture
def qmodel() -> QuantModel:
    return calibrated(TwoLayers(), torch.randn(2, 32, 6), qconfig(bits=2))


@pytest.fixture
def images() -> Tensor:
    return torch.randn(16, 3, 8, 8)


def labelled(model: nn.Module, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Labels that the float model is right about."""
    with torch.no_grad():
        return [(part, model(part).argmax(1)) for part in x.split(8)]


def state_of(qmodel: QuantModel) -> dict[str, Any]:
    tensors = {key: value.clone() for key, value in qmodel.state_dict().items()}
    switches = {quantizer.name: quantizer.use_quant for quantizer in qmodel.quantizers()}
    modes = {name: module.training for name, module in qmodel.named_modules()}
    hooks = {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in qmodel.named_modules()}
    return {"tensors": tensors, "switches": switches, "modes": modes, "hooks": hooks}


def assert_same(qmodel: QuantModel, before: dict[str, Any]) -> None:
    now = state_of(qmodel)
    assert {key: now[key] for key in ("switches", "modes", "hooks")} == {
        key: before[key] for key in ("switches", "modes", "hooks")
    }
    assert all(torch.equal(now["tensors"][key], value) for key, value in before["tensors"].items())


def test_scores_are_those_of_the_layer_in_float(qmodel: QuantModel) -> None:
    x = torch.randn(64, 6)
    batches = labelled(qmodel.original, x)
    found = qmodel.accuracy_gains(batches)
    assert found.float_score == 1.0 and found.num_samples == 64 and found.metric == "top-1 accuracy"
    labels = torch.cat([label for _, label in batches])
    with torch.no_grad():
        assert found.quantized_score == pytest.approx(float((qmodel(x).argmax(1) == labels).float().mean()))
        for row in found.layers:
            layer = getattr(qmodel.model, row.layer)
            layer.set_quant(False, False)
            expected = float((qmodel(x).argmax(1) == labels).float().mean())
            layer.set_quant(True, True)
            assert row.score == pytest.approx(expected) and row.gain == pytest.approx(expected - found.quantized_score)
    assert found.together == 1.0  # both layers: nothing is quantized any more
    assert [row.gain for row in found.layers] == sorted((row.gain for row in found.layers), reverse=True)
    assert "these 2 together" in str(found) and "float 1.0000" in str(found)


class Hidden(nn.Module):
    """The output hardly depends on `loud`, whose own error is the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.loud, self.quiet = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.quiet(x) + 1e-3 * self.loud(x)


def test_the_layers_that_matter_to_the_outputs_are_tried() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    config = qconfig({"W.SPECIFIC": [{"loud": ["QUANTIZER.BIT", 2]}]}, bits=4)
    qmodel = calibrated(Hidden().eval(), [x], config)
    batches = labelled(qmodel.original, x)
    assert qmodel.profile(batches).layers[0].layer == "loud"
    (row,) = qmodel.accuracy_gains(batches, num_layers=1).layers
    errors = {error.layer: error.sqnr_db for error in qmodel.profile(batches).layers}
    assert row.layer == "quiet" and row.sqnr_db == pytest.approx(errors["quiet"])
    assert len(qmodel.accuracy_gains(batches, num_layers=0).layers) == len(errors)


@torch.no_grad()
def test_a_layer_in_float_reads_float_inputs_where_others_read_them_quantized(images: Tensor) -> None:
    """The tensor behind the stem goes to a convolution and, quantized, to an addition."""
    qmodel = calibrated(Residual().eval(), [images], qconfig({"A.QADD.ENABLE_QUANT": True}, bits=3))
    seen: dict[str, Tensor] = {}
    qmodel.model.conv.op.register_forward_pre_hook(lambda _, args: seen.update(conv=args[0]))
    source = next(m for n, m in qmodel.model.named_modules() if "relu_shared" in n.replace(".", "_"))
    source.register_forward_hook(lambda _, args, output: seen.update(float=args[0], quantized=output))
    qmodel(images)
    assert torch.equal(seen["conv"], seen["quantized"])
    with FloatLayers(qmodel.built.captured, qmodel.float_parameters).of(["conv"]):
        qmodel(images)
    assert torch.equal(seen["conv"], seen["float"]) and not torch.equal(seen["float"], seen["quantized"])
    qmodel(images)
    assert torch.equal(seen["conv"], seen["quantized"])


def test_agreement_needs_no_labels(qmodel: QuantModel) -> None:
    found = qmodel.accuracy_gains(torch.randn(32, 6), "agreement", num_layers=2)
    assert found.float_score == 1.0 and found.together == 1.0 and found.quantized_score < 1
    assert "no labels" in found.metric and found.num_samples == 32


def test_a_function_gets_the_model(qmodel: QuantModel) -> None:
    x = torch.randn(8, 6)

    def minus_error(model: QuantModel) -> float:
        assert not model.training
        model.set_quant(*(model.is_quantized(kind) for kind in ("weight", "activation")))  # whatever it does there
        return -float((model(x) - model.original(x)).square().mean())

    found = qmodel.accuracy_gains(x, minus_error, num_layers=2)
    assert found.metric == "minus_error" and found.float_score == pytest.approx(0, abs=1e-10)
    assert found.quantized_score < 0 and found.num_samples == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_the_model_is_left_as_it_was(qmodel: QuantModel, error: type[BaseException], after: int) -> None:
    qmodel.train()
    qmodel.model.second.eval()  # a part that is in another mode
    qmodel.set_quant(a_quant=True)
    before, count = state_of(qmodel), 0

    def fails(model: QuantModel) -> float:
        nonlocal count
        count += 1
        model.set_quant(w_quant=True, a_quant=True)
        if count > after:
            raise error
        return 0.5

    with pytest.raises(error):
        qmodel.accuracy_gains(torch.randn(8, 6), fails)
    assert_same(qmodel, before)
    qmodel.accuracy_gains(labelled(qmodel.original, torch.randn(8, 6)))
    assert_same(qmodel, before)


def test_a_model_that_is_off_is_measured_quantized(qmodel: QuantModel) -> None:
    batches = labelled(qmodel.original, torch.randn(64, 6))
    expected = qmodel.accuracy_gains(batches)
    qmodel.set_quant(False, False)
    assert qmodel.accuracy_gains(batches) == expected
    assert not qmodel.is_quantized("weight")


def test_float_is_the_float_model_after_an_algorithm(images: Tensor) -> None:
    """GPTQ writes rounded values into weights: with its quantizer off, a layer would still be rounded."""
    model = Residual().eval()
    qmodel = calibrated(model, [images], qconfig(bits=2))
    gptq(qmodel, [images])
    before = state_of(qmodel)
    outputs: list[Tensor] = []

    def keeps(net: QuantModel) -> float:
        outputs.append(net(images))
        return 0.0

    qmodel.accuracy_gains(images, keeps, num_layers=0)
    torch.testing.assert_close(outputs[0], model(images))
    assert_same(qmodel, before)


@pytest.mark.parametrize("key", LABELS)
def test_labels_in_a_mapping(qmodel: QuantModel, key: str) -> None:
    batches = labelled(qmodel.original, torch.randn(16, 6))
    found = qmodel.accuracy_gains([{"x": x, key: y} for x, y in batches], num_layers=1)
    assert found == qmodel.accuracy_gains(batches, num_layers=1)


def test_a_loader_and_one_batch(qmodel: QuantModel) -> None:
    x = torch.randn(16, 6)
    y = qmodel.original(x).argmax(1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    assert qmodel.accuracy_gains(loader, num_layers=1) == qmodel.accuracy_gains(
        [(x[:8], y[:8]), (x[8:], y[8:])], num_layers=1
    )
    assert qmodel.accuracy_gains((x, y), num_layers=1).num_samples == 16


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([torch.randn(4, 6)], "batch 0 has no labels.*metric='agreement'"),
        ([(torch.randn(4, 6), torch.rand(4))], "batch 0 has no labels"),
        ([(torch.randn(4, 6), torch.zeros(4, dtype=torch.long)), torch.randn(4, 6)], "batch 1 has no labels"),
        ([(torch.randn(4, 6), torch.tensor([0, 1, 2, 3]))], "label 3, but the model has scores of 3 classes"),
        ([(torch.randn(4, 6), torch.zeros(4, 2, dtype=torch.long))], r"labels of shape \(4, 2\)"),
        ([], "no data"),
        (iter([(torch.randn(4, 6), torch.zeros(4, dtype=torch.long))]), "more than once"),
    ],
    ids=["none", "floats", "later", "unknown class", "shape", "empty", "iterator"],
)
def test_what_cannot_be_measured_is_refused(qmodel: QuantModel, data: Any, told: str) -> None:
    with pytest.raises(CalibrationError, match=told):
        qmodel.accuracy_gains(data)


def test_agreement_refuses_data_that_differs_between_passes(qmodel: QuantModel) -> None:
    samples: Any = torch.utils.data.TensorDataset(torch.randn(64, 6))
    loaders = {shuffle: torch.utils.data.DataLoader(samples, 16, shuffle=shuffle) for shuffle in (False, True)}
    assert qmodel.accuracy_gains(loaders[False], "agreement").float_score == 1.0
    with pytest.raises(CalibrationError, match="the data gives others"):
        qmodel.accuracy_gains(loaders[True], "agreement")


def test_other_outputs_need_a_function() -> None:
    qmodel = calibrated(nn.Linear(4, 1), [torch.randn(8, 4)])
    with pytest.raises(CalibrationError, match=r"shape \(8, 1\) is not scores of classes.*metric="):
        qmodel.accuracy_gains([torch.randn(8, 4)], "agreement")


def test_values_that_are_not_allowed(qmodel: QuantModel) -> None:
    x = torch.randn(4, 6)
    with pytest.raises(ConfigError, match="metric='top5': allowed: accuracy, agreement, or a function"):
        qmodel.accuracy_gains(x, "top5")
    with pytest.raises(ConfigError, match="num_layers=-1"):
        qmodel.accuracy_gains(x, "agreement", num_layers=-1)
    for given, told in ((float("nan"), "NaN"), (float("inf"), "inf"), (None, "NoneType"), (torch.ones(2), "Tensor")):
        with pytest.raises(CalibrationError, match=f"gave {told}; it must return"):
            qmodel.accuracy_gains(x, lambda model, given=given: given)  # type: ignore[misc]
    with pytest.raises(CalibrationError, match=r"accuracy_gains\(\) needs a calibrated model"):
        QuantModel(TwoLayers(), qconfig()).accuracy_gains(x, "agreement")


def test_a_loaded_model_that_lost_its_float_weights_says_so(
    images: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    qmodel = calibrated(Residual().eval(), [images], qconfig(bits=3))
    gptq(qmodel, [images])
    again = QuantModel.load(qmodel.save(tmp_path / "saved"), Residual())
    again.accuracy_gains(images, "agreement", num_layers=1)
    assert "the saved model does not contain the float model's values" in caplog.text
