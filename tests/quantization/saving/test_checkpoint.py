from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparsebit import tensor_files
from sparsebit.errors import CheckpointError
from sparsebit.folders import exchange
from sparsebit.quantization import QuantModel
from sparsebit.quantization.saving import checkpoint
from tests.quantization.tiny import Opaque, Residual, Tied, TwoLayers, calibrated, qconfig, run, site, sites

CONFIGS = {
    "uniform": {},
    "per-channel activations": {"A.QSCHEME": "per-channel-affine"},
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
        assert (loaded.is_quantized("weight"), loaded.is_quantized("activation")) == (w_quant, a_quant)

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
                "has format version 99; this sparsebit reads version 5; save the model again",
            ),
            ('{"format": "sparsebit-quantized", "version": 5}', "is damaged .*its checksum differs"),
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
        with pytest.raises(CheckpointError, match="forward of the Residual given differs"):
            QuantModel.load(folder, Residual())

    def test_a_file_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "saved").write_text("mine")
        with pytest.raises(CheckpointError, match="is a file; save\\(\\) writes a folder"):
            calibrated(TwoLayers(), [torch.randn(4, 6)]).save(tmp_path / "saved")
        assert (tmp_path / "saved").read_text() == "mine"


class TestNothingHalfWritten:
    def test_a_failure_leaves_no_trace(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        qmodel = calibrated(TwoLayers(), [torch.randn(4, 6)])
        monkeypatch.setattr(tensor_files, "serialize_file", failing)
        with pytest.raises(KeyboardInterrupt):
            qmodel.save(tmp_path / "deep" / "saved")
        assert list(tmp_path.iterdir()) == []

    def test_a_failure_leaves_the_older_saving_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        qmodel, x = calibrated(TwoLayers(), [torch.randn(4, 6)]), torch.randn(4, 6)
        folder, expected = qmodel.save(tmp_path / "saved"), qmodel(x)
        (folder / "notes.txt").write_text("mine")
        with torch.no_grad():
            qmodel.model.first.op.weight.zero_()
        monkeypatch.setattr(tensor_files, "serialize_file", failing)
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


class TestOnDisk:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return calibrated(TwoLayers(), [torch.randn(4, 6)]).save(tmp_path / "saved")

    def test_files_and_folders_have_the_rights_of_new_ones(self, folder: Path) -> None:
        (folder.parent / "file").touch()
        (folder.parent / "folder").mkdir()
        expected = stat.S_IMODE((folder.parent / "file").stat().st_mode)
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {expected}
        assert folder.stat().st_mode == (folder.parent / "folder").stat().st_mode

    def test_a_folder_keeps_its_rights(self, folder: Path) -> None:
        folder.chmod(0o750)
        calibrated(TwoLayers(), [torch.randn(4, 6)]).save(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o750

    def test_all_is_flushed_before_it_is_seen(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        steps: list[str] = []
        monkeypatch.setattr(checkpoint, "flush", lambda path: steps.append(path.name))
        monkeypatch.setattr(checkpoint, "exchange", lambda *paths: steps.append("exchange") or exchange(*paths))
        qmodel = calibrated(TwoLayers(), [torch.randn(4, 6)])
        qmodel.save(tmp_path / "saved")
        steps.clear()
        qmodel.save(tmp_path / "saved")
        assert steps[:2] == ["model.safetensors", "sparsebit.json"]
        assert steps[2].startswith(".saved.") and steps[3:] == ["exchange", tmp_path.name]

    @pytest.mark.parametrize("where", ["header", "data", "end"])
    def test_a_flipped_bit_names_the_file(self, folder: Path, where: str) -> None:
        file = folder / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[{"header": 200, "data": -100, "end": -1}[where]] ^= 1
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged .*checksum differs"):
            QuantModel.load(folder, TwoLayers())

    def test_a_changed_manifest_is_an_error(self, folder: Path) -> None:
        file = folder / "sparsebit.json"
        file.write_text(file.read_text().replace('"weight": true', '"weight": false'))
        with pytest.raises(CheckpointError, match=r"sparsebit\.json is damaged .*checksum differs"):
            QuantModel.load(folder, TwoLayers())

    def test_a_manifest_laid_out_anew_is_whole(self, folder: Path) -> None:
        file = folder / "sparsebit.json"
        file.write_text(json.dumps(json.loads(file.read_text())))
        QuantModel.load(folder, TwoLayers())

    def test_a_link_to_a_folder_stays_one(self, folder: Path) -> None:
        link = folder.parent / "link"
        link.symlink_to(folder, target_is_directory=True)
        calibrated(TwoLayers(), [torch.randn(4, 6)]).save(link)
        assert link.is_symlink() and sorted(os.listdir(folder)) == ["model.safetensors", "sparsebit.json"]

    def test_a_full_disk(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        qmodel = calibrated(TwoLayers(), [torch.randn(4, 6)])
        monkeypatch.setattr(Path, "write_text", full)
        with pytest.raises(CheckpointError, match=r"saved cannot be written .*No space left.* before is unchanged"):
            qmodel.save(folder)
        assert os.listdir(folder.parent) == ["saved"]
        QuantModel.load(folder, TwoLayers())

    @pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="POSIX")
    def test_a_limit_of_the_size_of_files(self, tmp_path: Path) -> None:
        """The tensors are written by safetensors, which has its own errors."""
        import resource

        qmodel = calibrated(TwoLayers(), [torch.randn(4, 6)])
        limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(CheckpointError, match="cannot be written"):
                qmodel.save(tmp_path / "saved")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
@pytest.mark.parametrize("others", [False, True], ids=["folders change places", "file by file"])
def test_a_saving_is_never_seen_in_halves(tmp_path: Path, others: bool) -> None:
    """Real processes: killed at any moment, killed at every step, and reading beside two that write."""
    folder = tmp_path / "saved"
    folder.mkdir()
    if others:
        (folder / "notes.txt").write_text("mine")
    done = subprocess.run(
        [sys.executable, "-m", "tests.quantization.saving_processes", str(folder)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_file_by_file_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stands in the folder still does when the folder has changed."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        qmodel, x = calibrated(TwoLayers(), [torch.randn(4, 6)]), torch.randn(4, 6)
        qmodel.save(".")
        assert sorted(os.listdir()) == ["model.safetensors", "sparsebit.json"]
        assert torch.equal(QuantModel.load(".", TwoLayers())(x), qmodel(x))


@pytest.mark.parametrize("fault", [None, OSError(errno.ENOSPC, "full")], ids=["well", "full disk"])
def test_file_by_file_where_folders_cannot_change_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: OSError | None
) -> None:
    """As on a mount point: not in one step, and not by renaming from beside it."""
    old, new, x = *(calibrated(TwoLayers(), [torch.randn(4, 6)]) for _ in range(2)), torch.randn(4, 6)
    folder = old.save(tmp_path / "saved")
    replace = os.replace

    def inside_only(source: Path, target: Path) -> None:
        if source.parent != target.parent:
            raise OSError(errno.EXDEV, "another file system")
        if fault is not None:
            raise fault
        replace(source, target)

    monkeypatch.setattr(checkpoint, "exchange", lambda *_: False)
    monkeypatch.setattr(os, "replace", inside_only)
    with pytest.raises(CheckpointError, match="full") if fault else contextlib.nullcontext():
        new.save(folder)
    assert sorted(os.listdir(folder)) == ["model.safetensors", "sparsebit.json"]
    assert os.listdir(tmp_path) == ["saved"]
    assert torch.equal(QuantModel.load(folder, TwoLayers())(x), (old if fault else new)(x))


def test_what_killed_runs_have_left_is_no_obstacle(tmp_path: Path) -> None:
    qmodel = calibrated(TwoLayers(), [torch.randn(4, 6)])
    folder = qmodel.save(tmp_path / "saved")
    for parent in (tmp_path, folder):
        (parent / ".saved.sparsebit-0123456789abcdef").mkdir()
        (parent / ".saved.sparsebit-0123456789abcdef" / "model.safetensors").write_text("half")
    (folder / ".model.safetensors.0123456789abcdef").write_text("half")
    assert checkpoint.foreign_files(folder) == []
    qmodel.save(folder)
    assert sorted(os.listdir(folder)) == ["model.safetensors", "sparsebit.json"] and os.listdir(tmp_path) == ["saved"]


class TestDamage:
    """Whatever is done to the files: a CheckpointError, or the same model."""

    def test_files(self, tmp_path: Path) -> None:
        whole = calibrated(TwoLayers(), [torch.randn(4, 6)]).save(tmp_path / "whole")
        expected = checkpoint.read(whole)
        draw = random.Random(0)
        for _ in range(300):
            folder = shutil.copytree(whole, tmp_path / "damaged", dirs_exist_ok=True)
            damage(folder / draw.choice(["sparsebit.json", "model.safetensors"]), draw)
            with contextlib.suppress(CheckpointError):
                description, tensors = checkpoint.read(folder)
                assert description == expected[0]
                assert all(torch.equal(tensors[name], tensor) for name, tensor in expected[1].items())

    @pytest.mark.parametrize("state", [
        torch.tensor([], dtype=torch.uint8), torch.tensor(3.0), torch.tensor([2, 1], dtype=torch.uint8),
        torch.tensor([2, 1, 0, 200, 7], dtype=torch.uint8), torch.tensor([2, 1, 0, *b"{}"], dtype=torch.uint8),
        torch.tensor([0, *b"[]"], dtype=torch.uint8), torch.tensor([2, 1, 0, *b"[1]"], dtype=torch.int64),
        torch.tensor([True]), torch.tensor([[0.5]]), "text",
    ], ids=str)  # fmt: skip
    def test_the_state_of_a_quantizer(self, state: Any) -> None:
        qmodel = calibrated(TwoLayers(), [torch.randn(4, 6)])
        found = qmodel.state_dict()
        found[next(name for name in found if name.endswith("_extra_state"))] = state
        with pytest.raises(CheckpointError, match="state of a quantizer"):
            qmodel.load_state_dict(found)


def damage(file: Path, draw: random.Random) -> None:
    """Cut it off, change some bytes, or (JSON) put another value in some place."""
    data = bytearray(file.read_bytes())
    how = draw.choice(["cut", "flip", "replace"] if file.suffix == ".json" else ["cut", "flip"])
    if how == "cut":
        del data[draw.randrange(len(data)) :]
    elif how == "flip":
        for _ in range(draw.choice([1, 1, 5])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    else:
        value = json.loads(data)
        place, nests = value, [value]
        while nests:
            place = draw.choice(nests)
            nests = [item for item in (place.values() if isinstance(place, dict) else place) if item]
            nests = [item for item in nests if isinstance(item, (dict, list))] if draw.random() < 0.7 else []
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        place[draw.choice(keys)] = draw.choice([None, -1, 2**70, 0.5, "x", [], {}, [1], {"tensor": [-3]}, True])
        data = bytearray(json.dumps(value).encode())
    file.write_bytes(data)


def test_a_gpu_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    qmodel = calibrated(TwoLayers(), [torch.randn(4, 6)])
    qmodel.config = qmodel.config.replace("DEVICE", "cuda:7")  # as if it had been saved there
    with pytest.raises(CheckpointError, match=r"no GPU here.*load\(\.\.\., device=\"cpu\"\)"):
        QuantModel.load(qmodel.save(tmp_path), TwoLayers())
