from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparsebit.errors import CheckpointError
from sparsebit.quantization import QuantModel, checkpoint
from tests.quantization.tiny import Opaque, Residual, TwoLayers, calibrated, qconfig, run, site, sites

CONFIGS = {
    "uniform": {},
    "per-channel features": {"A.QSCHEME": "per-channel-affine"},
    "pact": {"A.QUANTIZER.TYPE": "pact"},
    "per-channel pact": {"A.QUANTIZER.TYPE": "pact", "A.QSCHEME": "per-channel-symmetric"},
    "lsq": {"A.QUANTIZER.TYPE": "lsq", "W.QUANTIZER.TYPE": "lsq"},
    "lsq+": {"A.QUANTIZER.TYPE": "lsq+", "W.QUANTIZER.TYPE": "lsq+", "W.QSCHEME": "per-tensor-affine"},
    "dorefa": {"W.QUANTIZER.TYPE": "dorefa"},
    "groups": {"W.QSCHEME": "per-group-symmetric", "W.QUANTIZER.GROUP_SIZE": 2},
    "folded": {"SCHEDULE.FUSE_BN": True, "A.QADD.ENABLE_QUANT": True},
    "specific": {"W.SPECIFIC": [{"fc": ["QUANTIZER.BIT", 3]}]},
}


@pytest.fixture(params=CONFIGS, ids=list(CONFIGS))
def qmodel(request: pytest.FixtureRequest) -> QuantModel:
    return calibrated(Residual().eval(), [torch.randn(2, 3, 8, 8)], qconfig(CONFIGS[request.param]))


class TestRoundTrip:
    def test_the_folder_gives_the_same_model(self, qmodel: QuantModel, tmp_path: Path) -> None:
        x = torch.randn(3, 3, 8, 8)
        folder = qmodel.save(tmp_path / "saved")
        assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "sparsebit.json"]
        loaded = QuantModel.load(folder, Residual())
        assert torch.equal(loaded(x), qmodel(x))
        assert loaded.config == qmodel.config and sites(loaded) == sites(qmodel)
        assert not loaded.training

    def test_a_state_dict_loads_into_a_fresh_model(self, qmodel: QuantModel) -> None:
        x = torch.randn(3, 3, 8, 8)
        fresh = QuantModel(Residual(), qmodel.config)
        fresh.load_state_dict(qmodel.state_dict())
        fresh.set_quant(w_quant=True, a_quant=True)
        assert torch.equal(fresh.eval()(x), qmodel(x))

    def test_a_loaded_model_lives_on(self, tmp_path: Path) -> None:
        qmodel = calibrated(TwoLayers(), [torch.randn(4, 6)])
        loaded = QuantModel.load(qmodel.save(tmp_path / "saved"), TwoLayers())
        loaded.prepare_calibration()
        run(loaded, [10 * torch.randn(4, 6)])
        loaded.calc_qparams()
        assert site(loaded, "first.input").scale > 2 * site(qmodel, "first.input").scale

    @pytest.mark.parametrize(("w_quant", "a_quant"), [(True, False), (False, True), (False, False)])
    def test_the_switches_are_kept(self, tmp_path: Path, w_quant: bool, a_quant: bool) -> None:
        qmodel = calibrated(TwoLayers(), [torch.randn(4, 6)])
        qmodel.set_quant(w_quant=w_quant, a_quant=a_quant)
        loaded = QuantModel.load(qmodel.save(tmp_path / "saved"), TwoLayers())
        assert (loaded.is_quantized("weight"), loaded.is_quantized("feature")) == (w_quant, a_quant)

    def test_bits_changed_by_hand_are_kept(self, tmp_path: Path) -> None:
        qmodel, x = calibrated(TwoLayers(), [torch.randn(4, 6)]), torch.randn(4, 6)
        site(qmodel, "first.weight").set_bit(3)
        loaded = QuantModel.load(qmodel.save(tmp_path / "saved"), TwoLayers())
        assert site(loaded, "first.weight").spec.bits == 3
        assert torch.equal(loaded(x), qmodel(x))

    def test_an_unseen_quantizer_stays_off_by_folder_and_by_state_dict(self, tmp_path: Path) -> None:
        class Mixed(nn.Module):
            def forward(self, x: Tensor, mask: Tensor) -> Tensor:
                return x * mask

        inputs = torch.randn(4, 6), torch.ones(4, 6, dtype=torch.bool)
        qmodel = calibrated(Mixed(), [inputs])
        loaded = QuantModel.load(qmodel.save(tmp_path / "saved"), Mixed())
        fresh = QuantModel(Mixed(), qconfig())
        fresh.load_state_dict(qmodel.state_dict())
        fresh.set_quant(w_quant=True, a_quant=True)
        for other in (loaded, fresh):
            assert torch.equal(other(*inputs), qmodel(*inputs))
            assert "mul.input.1 never saw" in str(other.coverage)

    def test_tied_weights_are_stored_once_and_tied_again(self, tmp_path: Path) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.head = nn.Embedding(12, 4), nn.Linear(4, 12, bias=False)
                self.head.weight = self.embed.weight

            def forward(self, ids: Tensor) -> Tensor:
                return self.head(self.embed(ids))

        ids = torch.arange(12).reshape(2, 6)
        qmodel = calibrated(Tied(), [ids])
        folder = qmodel.save(tmp_path / "saved")
        assert "model.head.op.weight" not in load_file(folder / "model.safetensors")
        loaded = QuantModel.load(folder, Tied())
        assert torch.equal(loaded(ids), qmodel(ids))
        assert loaded.model.head.op.weight is loaded.model.embed.op.weight

    def test_opaque_model(self, tmp_path: Path) -> None:
        qmodel, x = calibrated(Opaque(), [torch.randn(4, 6)]), torch.randn(4, 6)
        assert torch.equal(QuantModel.load(qmodel.save(tmp_path / "saved"), Opaque())(x), qmodel(x))


class Branching(nn.Module):
    """Needs an example to be captured: which branch, which optional arguments, how many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, flags: tuple[int, ...] = (1, 2), scale: float = 1.0
    ) -> Tensor:
        x = self.a(x) if x.shape[1] == 3 else self.b(x)
        return (x if mask is None else x * mask) * scale


class TestExample:
    def test_the_form_of_the_call_is_kept(self, tmp_path: Path) -> None:
        batch = {"x": torch.randn(2, 3, 6), "mask": torch.rand(2, 3, 1), "scale": 2.0}
        qmodel = QuantModel(Branching(), qconfig(), example_inputs=batch)
        qmodel.prepare_calibration()
        qmodel(**batch)
        qmodel.calc_qparams()
        qmodel.set_quant(w_quant=True, a_quant=True)
        loaded = QuantModel.load(qmodel.save(tmp_path / "saved"), Branching())
        assert torch.equal(loaded(**batch), qmodel(**batch))
        assert loaded.call_form == qmodel.call_form

    def test_a_form_first_shown_in_calibration_is_kept(self, tmp_path: Path) -> None:
        class Masked(nn.Module):
            def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
                return x if mask is None else torch.sigmoid(x) * mask

        inputs = torch.randn(2, 3), torch.rand(2, 3)
        qmodel = calibrated(Masked(), [inputs])
        assert torch.equal(QuantModel.load(qmodel.save(tmp_path / "saved"), Masked())(*inputs), qmodel(*inputs))

    def test_defaults_that_json_does_not_know_are_no_trouble(self, tmp_path: Path) -> None:
        class Defaults(nn.Module):
            def forward(self, x: Tensor, kind: torch.dtype = torch.float32, sizes: tuple[int, ...] = (1, 2)) -> Tensor:
                return torch.sigmoid(x).to(kind) * sizes[1]

        qmodel, x = calibrated(Defaults(), [torch.randn(3)]), torch.randn(3)
        assert torch.equal(QuantModel.load(qmodel.save(tmp_path / "saved"), Defaults())(x), qmodel(x))

    def test_an_example_without_a_form_in_json_is_asked_for(self, tmp_path: Path) -> None:
        class Thing:
            def __init__(self, value: float) -> None:
                self.value = value

        class Odd(Branching):
            def forward(self, x: Tensor, thing: Thing | None = None) -> Tensor:  # type: ignore[override]
                return super().forward(x) * (2.0 if thing is not None else 1.0)

        batch = (torch.randn(2, 3, 6), Thing(2.0))
        qmodel = QuantModel(Odd(), qconfig(), example_inputs={"x": batch[0], "thing": batch[1]})
        qmodel.prepare_calibration()
        qmodel(*batch)
        qmodel.calc_qparams()
        folder = qmodel.save(tmp_path / "saved")
        with pytest.raises(CheckpointError, match="example_inputs"):
            QuantModel.load(folder, Odd())
        loaded = QuantModel.load(folder, Odd(), example_inputs={"x": batch[0], "thing": batch[1]})
        assert torch.equal(loaded(*batch), qmodel(*batch))

    @pytest.mark.parametrize(
        "value",
        [None, {"a": [1, 2.5, "x", True, None]}, ((torch.randn(2, 3),), {"m": torch.zeros(4, dtype=torch.int64)})],
        ids=["nothing", "plain", "tensors"],
    )
    def test_nests_come_back_as_shapes(self, value: Any) -> None:
        again = checkpoint.decode(json.loads(json.dumps(checkpoint.encode(value))))
        assert checkpoint.encode(again) == checkpoint.encode(value)

    def test_what_has_no_form(self) -> None:
        assert checkpoint.encode({"x": object()}) is None


class TestFaults:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return calibrated(TwoLayers(), [torch.randn(4, 6)]).save(tmp_path / "saved")

    def test_no_such_folder(self, tmp_path: Path) -> None:
        with pytest.raises(
            CheckpointError, match=r"nowhere holds no sparsebit.json; give a folder that QuantModel.save"
        ):
            QuantModel.load(tmp_path / "nowhere", TwoLayers())

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "is damaged"),
            ("[]", "is not a sparsebit checkpoint"),
            ('{"format": "other"}', "is not a sparsebit checkpoint"),
            (
                '{"format": "sparsebit-quantized", "version": 99}',
                "has format version 99; this sparsebit reads version 1",
            ),
            ('{"format": "sparsebit-quantized", "version": 1}', "is damaged .*config.* missing"),
        ],
    )
    def test_a_foreign_or_damaged_manifest(self, folder: Path, text: str, message: str) -> None:
        (folder / "sparsebit.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            QuantModel.load(folder, TwoLayers())

    def test_missing_tensors(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"model.safetensors is missing; save the model again"):
            QuantModel.load(folder, TwoLayers())

    def test_damaged_tensors(self, folder: Path) -> None:
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(100)
        with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
            QuantModel.load(folder, TwoLayers())

    def test_halves_of_two_savings(self, folder: Path, tmp_path: Path) -> None:
        other = calibrated(TwoLayers(), [torch.randn(4, 6)]).save(tmp_path / "other")
        shutil.copy(other / "model.safetensors", folder / "model.safetensors")
        with pytest.raises(CheckpointError, match="come from different savings"):
            QuantModel.load(folder, TwoLayers())

    def test_tensors_without_a_key(self, folder: Path) -> None:
        save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
        with pytest.raises(CheckpointError, match="come from different savings"):
            QuantModel.load(folder, TwoLayers())

    def test_another_architecture(self, folder: Path) -> None:
        with pytest.raises(CheckpointError, match="was saved from another model than the Residual given"):
            QuantModel.load(folder, Residual())

    def test_a_file_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "saved").write_text("mine")
        with pytest.raises(CheckpointError, match="is a file; save\\(\\) writes a folder"):
            calibrated(TwoLayers(), [torch.randn(4, 6)]).save(tmp_path / "saved")
        assert (tmp_path / "saved").read_text() == "mine"


class TestNothingHalfWritten:
    def test_a_failure_leaves_no_trace(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        qmodel = calibrated(TwoLayers(), [torch.randn(4, 6)])
        monkeypatch.setattr(checkpoint, "serialize_file", failing)
        with pytest.raises(KeyboardInterrupt):
            qmodel.save(tmp_path / "deep" / "saved")
        assert list(tmp_path.iterdir()) == []

    def test_a_failure_leaves_the_older_saving_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        qmodel, x = calibrated(TwoLayers(), [torch.randn(4, 6)]), torch.randn(4, 6)
        folder, expected = qmodel.save(tmp_path / "saved"), qmodel(x)
        (folder / "notes.txt").write_text("mine")
        with torch.no_grad():
            qmodel.model.first.op.weight.zero_()
        monkeypatch.setattr(checkpoint, "serialize_file", failing)
        with pytest.raises(KeyboardInterrupt):
            qmodel.save(folder)
        assert sorted(os.listdir(folder)) == ["model.safetensors", "notes.txt", "sparsebit.json"]
        assert torch.equal(QuantModel.load(folder, TwoLayers())(x), expected)

    def test_saving_again_replaces(self, tmp_path: Path) -> None:
        first = calibrated(TwoLayers(), [torch.randn(4, 6)])
        second, x = calibrated(TwoLayers(), [torch.randn(4, 6)]), torch.randn(4, 6)
        first.save(tmp_path)
        second.save(tmp_path)
        assert torch.equal(QuantModel.load(tmp_path, TwoLayers())(x), second(x))


def failing(tensors: Any, path: Path, metadata: Any) -> None:
    path.write_bytes(b"half")
    raise KeyboardInterrupt


def test_the_manifest_describes_itself(tmp_path: Path) -> None:
    qmodel = calibrated(TwoLayers(), [torch.randn(4, 6)], qconfig(bits=4))
    manifest = json.loads((qmodel.save(tmp_path) / "sparsebit.json").read_text())
    assert manifest["config"]["W"]["QUANTIZER"]["BIT"] == 4
    assert manifest["sites"]["first.weight"]["granularity"] == "PerChannel(axis=0)"
    assert {"format", "version", "sparsebit", "torch"} <= manifest.keys()


def test_device_may_be_chosen_anew(tmp_path: Path) -> None:
    qmodel = calibrated(TwoLayers(), [torch.randn(4, 6)])
    qmodel.config = qmodel.config.replace("DEVICE", "cuda:7")  # as if it had been saved there
    loaded = QuantModel.load(qmodel.save(tmp_path), TwoLayers(), device="cpu")
    assert loaded.config.DEVICE == "cpu"
