"""The files at the top of a finished run, and the training script, which really runs."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from sparsebit.compress import Result, compress
from sparsebit.compress.judging.metrics import NOISE
from sparsebit.compress.networks import outcome
from sparsebit.compress.networks.training_script import training_script
from sparsebit.quantization import QuantModel
from sparsebit.records import read_record
from sparsebit.records.ladder import Ladder
from tests.compress.made import goal, ladder, step
from tests.compress.nets import Patterns, batches, trained

ASKED: dict[str, Any] = {"metric": NOISE, "max_loss": 0.0, "minutes": 1, "rungs": ("eight bits",), "target": "virtual"}


class Killed(BaseException):
    """Ends a call as SIGKILL does."""


def killed(found: Ladder) -> None:
    if found.reason:  # all is judged; only the results at the top of the run are missing
        raise Killed


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A search whose goal, no noise at all, is not met. The first call is killed before it writes the results."""
    how = {**ASKED, "folder": tmp_path_factory.mktemp("lost") / "run"}
    with pytest.raises(Killed):
        compress(trained(), batches(128, 3), **how, show=killed)
    assert not (how["folder"] / "best.onnx").exists()
    return compress(trained(), batches(128, 3), **how)


def test_without_time_the_reason_names_no_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "_REASON_SHARE", 0.0)
    found = compress(trained(), batches(128, 3), **ASKED, folder=tmp_path / "run")
    assert not found.met and "train.py" in found.reason and "most of it at" not in found.reason


def test_the_files_of_the_nearest_candidate_and_how_to_train_it(lost: Result) -> None:
    assert not lost.met and lost.ladder.best == "01-w8" and "train.py" in lost.reason
    assert re.search(r"most of it at (conv1|deep|conv2|head)", lost.reason)
    assert len(lost.steps) == 1 and lost.ladder.finished and "best.yaml" in lost.ladder.reproduce
    names = {path.name for path in lost.folder.iterdir() if not path.name.startswith(".")}
    assert names == {
        "best", "best.onnx", "best.yaml", "candidates", "float.onnx", "ladder.json", "record.json", "train.py",
    }  # fmt: skip
    assert read_record(lost.folder / "record.json").audits == ()  # the target does not run here
    assert Ladder.from_json((lost.folder / "ladder.json").read_text()) == lost.ladder


def filled(script: Path, save: str = "") -> str:
    """The script with its two functions written by a user, and one epoch."""
    text = script.read_text()
    for name, answer in (("float_model", "return trained()"), ("batches", "return data(64, 5)")):
        begin = text.index("raise NotImplementedError", text.index(f"def {name}():"))
        text = text[:begin] + answer + text[text.index("\n", begin) :]
    text = text.replace("EPOCHS, RATE = 10, 1e-5", "EPOCHS, RATE = 1, 1e-3")
    return f"from tests.compress.nets import batches as data, trained\n{text}\n{save}"


def test_the_training_script_trains_and_writes_a_checked_file(
    lost: Result, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = lost.folder / "filled.py"
    script.write_text(filled(lost.folder / "train.py"))
    try:
        runpy.run_path(str(script))
        assert "epoch 1 of 1: loss" in capsys.readouterr().out
        again, before = QuantModel.load(lost.folder / "trained", trained()).state_dict(), lost.model.state_dict()
        assert not again["model.conv2.op.weight"].equal(before["model.conv2.op.weight"])
        assert (lost.folder / "trained.onnx").is_file()
    finally:
        for name in ("filled.py", "trained.onnx"):
            (lost.folder / name).unlink(missing_ok=True)


class Named(Patterns):
    """Returns its scores by a name, as models of transformers do, and the predicted labels."""

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return {"logits": found, "labels": found.argmax(1)}


@pytest.mark.slow
def test_the_training_script_of_a_model_that_returns_a_mapping(tmp_path: Path) -> None:
    net = Named()
    net.load_state_dict(trained().state_dict())
    found = compress(net, batches(128, 3), folder=tmp_path / "run", **ASKED)
    script = found.folder / "filled.py"
    make = "from tests.compress.networks.test_outcome import Named\n"
    text = filled(found.folder / "train.py").replace("return trained()", "return made()")
    made = "def made():\n    net = Named()\n    net.load_state_dict(trained().state_dict())\n    return net.eval()\n"
    script.write_text(f"{make}{made}{text}")
    runpy.run_path(str(script))
    assert (found.folder / "trained.onnx").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
def test_the_training_script_of_a_pruned_candidate(target: str, tmp_path: Path) -> None:
    how = {**ASKED, "budget": {"macs": 0.7}, "rungs": ("eight bits", "channels"), "target": target}
    found = compress(trained(), batches(128, 3), folder=tmp_path / "run", **how)
    assert not found.met and (found.folder / "small").is_dir()
    script = found.folder / "filled.py"
    script.write_text(filled(found.folder / "train.py"))
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "epoch 1 of 1: loss" in done.stdout and (found.folder / "trained.onnx").is_file()


def test_class_scores_are_trained_by_their_divergence_and_values_by_their_distance() -> None:
    one = step("01-w8", recipe=None)
    plain, pruned = ({"config": "", "placement": "default", "sparsity": text} for text in (None, "SPARSER: {}"))
    of_values = training_script(ladder(goal(), replace(one, recipe=plain)))
    classes = ladder(replace(goal(), metric="same top-1 as float"), replace(one, recipe=pruned))
    assert "F.mse_loss(" in of_values and 'load(HERE / "small"' not in of_values
    of_classes = training_script(classes)
    assert "F.kl_div(" in of_classes and 'net = load(HERE / "small", float_model())' in of_classes
    for script in (of_values, of_classes):
        compile(script, "train.py", "exec")
