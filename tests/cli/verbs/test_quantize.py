"""`sparsebit quantize`, from names on a command line to a folder that loads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparsebit import tensor_files
from sparsebit.cli.inputs.loading import load_model
from sparsebit.cli.options import Arguments
from sparsebit.cli.verbs.quantize import read_outputs
from sparsebit.quantization import QuantModel
from tests.cli.conftest import Sparsebit

COMMAND = (
    "quantize", "--model", "own_project:Net", "--data", "own_project:batches", "--device", "cpu", "--output", "saved",
)  # fmt: skip


def test_saves_what_loads(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMMAND)
    assert answer.code == 0, answer.err
    assert "3 of 3 weighted layers, W8 A8 on onnxruntime" in answer.out and "24 samples" in answer.out
    assert "x smaller" in answer.out and "onnxruntime runs mean in float" in answer.out
    model, x = load_model("own_project:Net"), torch.randn(2, 3, 8, 8)
    qmodel = QuantModel.load(project / "saved", model)
    error = (qmodel(x) - model(x)).norm() / model(x).norm()
    assert 0 < error < 0.05


def test_effort_and_algorithms_of_the_config(sparsebit: Sparsebit, project: Path) -> None:
    """The data is read more than once, and its samples are counted once."""
    by_name = sparsebit(*COMMAND, "--effort", "good", "--json")
    assert by_name.code == 0, by_name.err
    assert by_name.json["num_samples"] == 24
    bits = "W: {QUANTIZER: {BIT: 4}}\nA: {QUANTIZER: {BIT: 8}}\n"
    (project / "plain.yaml").write_text(bits)
    (project / "gptq.yaml").write_text(f"{bits}ALGORITHMS: [gptq]\n")
    errors = [sparsebit(*COMMAND, "-c", f"{name}.yaml", "--json").json["output_sqnr_db"] for name in ("plain", "gptq")]
    assert errors[1] > errors[0] + 2
    loaded = QuantModel.load(project / "saved", load_model("own_project:Net"))
    assert loaded.applied_algorithms == ("gptq",)
    for options, message in (
        (("--effort", "most"), "allowed: fast, good, best"),
        (("-c", "gptq.yaml", "--effort", "good"), "the config has ALGORITHMS, too"),
    ):
        refused = sparsebit(*COMMAND, *options)
        assert refused.code != 0 and message in refused.err, refused.err


def test_weights_alone_need_no_data(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit("quantize", "-m", "own_project:Net", "-c", "weights-only", "-o", "saved", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["num_samples"] == 0 and answer.json["output_sqnr_db"] is None
    model, x = load_model("own_project:Net"), torch.randn(2, 3, 8, 8)
    qmodel = QuantModel.load(project / "saved", model)
    assert 0 < (qmodel(x) - model(x)).norm() / model(x).norm() < 0.05
    shown = sparsebit("quantize", "-m", "own_project:Net", "-c", "weights-only", "-o", "saved")
    assert shown.code == 0 and "without data" in shown.out and "SQNR" not in shown.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "saved"], "ranges of activations are found on data"),
        (["-c", "weights-only", "-o", "saved.onnx"], "a file is written from an example call"),
        (["-c", "weights-only", "-o", "saved", "--size", "8"], "--size cannot be used with no --data"),
        (["-c", "weights-only", "-o", "saved", "--asym"], "--asym calibrates on data"),
        (
            ["-c", "{W: {QUANTIZER: {BIT: 4}}, A: {QUANTIZER: {DISABLE: true}}}", "-o", "saved", "--effort", "good"],
            "gptq work on data",
        ),
    ],
    ids=["activations", "file", "size", "asym", "effort"],
)
def test_what_needs_data(sparsebit: Sparsebit, project: Path, arguments: list[str], message: str) -> None:
    answer = sparsebit("quantize", "-m", "own_project:Net", *arguments)
    assert answer.code == 2 and "--data" in answer.err and message in " ".join(answer.err.replace("│", "").split())
    assert not list(project.glob("saved*"))


def test_few_samples_are_told_once(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMMAND, "--num-samples", 4)
    assert answer.code == 0 and answer.err.count("calibrated on 4 samples") == 1


def test_json(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMMAND, "--json", "--num-samples", 16)
    assert answer.code == 0 and "chatter" in answer.err
    assert answer.json["num_samples"] == 16 and answer.json["output_sqnr_db"] > 25 and answer.json["warnings"] == []
    assert answer.json["coverage"]["num_weighted_quantized"] == 3
    assert answer.json["weight_bytes"]["quantized"] < answer.json["weight_bytes"]["float"]


def test_quiet(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMMAND, "--quiet")
    assert answer.code == 0 and answer.out == "" and "calibrating" not in answer.err
    assert (project / "saved" / "sparsebit.json").is_file()


def test_weights_config_and_npz(sparsebit: Sparsebit, project: Path) -> None:
    pytest.importorskip("numpy").savez("data.npz", x=torch.randn(6, 3, 8, 8).numpy())
    torch.manual_seed(5)
    other = load_model("own_project:Net", None)
    other.head.bias.data.fill_(3.0)
    save_file(other.state_dict(), "net.safetensors")
    Path("config.yaml").write_text("DEVICE: cpu\nW: {QUANTIZER: {BIT: 6}}\nA: {QUANTIZER: {BIT: 8}}\n")
    answer = sparsebit(
        *(
            "quantize",
            "-m",
            "own_project:Net",
            "-w",
            "net.safetensors",
            "-c",
            "config.yaml",
            "-d",
            "data.npz",
            "-o",
            "saved",
        ),
        *("--batch-size", 4, "--asym"),
    )
    assert answer.code == 0, answer.err
    assert "W6 A8 on virtual" in answer.out
    bias = QuantModel.load("saved", load_model("own_project:Net")).state_dict()["model.head.op.bias"]
    assert bias.tolist() == [3.0] * 10


def test_image_folder(sparsebit: Sparsebit, project: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for index in range(4):
        folder = project / "photos" / f"class{index % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        image.effect_noise((12, 10), 60).convert("RGB").save(folder / f"{index}.png")
    answer = sparsebit(
        *("quantize", "-m", "own_project:Net", "-d", "photos", "-o", "saved", "--device", "cpu", "--json"),
        *("--size", 8, "--resize", 9, "--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225"),
    )
    assert answer.code == 0, answer.err
    assert answer.json["num_samples"] == 4


def test_model_arguments(sparsebit: Sparsebit, project: Path) -> None:
    assert sparsebit(*COMMAND, "--model-args", '{"classes": 3}').code == 0
    qmodel = QuantModel.load("saved", load_model("own_project:Net", Arguments((3,))))
    assert qmodel(torch.randn(2, 3, 8, 8)).shape == (2, 3)


def test_glob_without_a_layer_is_a_warning(sparsebit: Sparsebit, project: Path) -> None:
    Path("config.yaml").write_text(
        'DEVICE: cpu\nW: {QUANTIZER: {BIT: 8}, SPECIFIC: [{"sten.*": [QUANTIZER.BIT, 4]}]}\nA: {QUANTIZER: {BIT: 8}}\n'
    )
    answer = sparsebit(*COMMAND, "-c", "config.yaml", "--json")
    assert answer.code == 0
    assert [warning for warning in answer.json["warnings"] if "matches no layer" in warning and "stem" in warning]
    assert "warning: W.SPECIFIC" in answer.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-d", "own_project:broken"], 1, "no such checkpoint"),
        (["-w", "nowhere.pt"], 1, "there is no such file"),
        (["-c", "nowhere.yaml"], 1, "no config file"),
        (["-o", "other"], 2, "give one folder, one file (.onnx, .pte, .tflite, .mlpackage, .pt2), or both"),
        (["--opset", "21", "--no-check"], 2, "--opset, --no-check need an --output that is a file"),
        (["--size", "8"], 2, "--size cannot be used"),
        (["--model-args", "{"], 2, "not valid JSON"),
        (["--num-samples", "0"], 2, "--num-samples"),
    ],
    ids=["data", "weights", "config", "two folders", "no file", "misplaced option", "arguments", "samples"],
)
def test_faults(sparsebit: Sparsebit, project: Path, arguments: list[str], code: int, message: str) -> None:
    answer = sparsebit(*COMMAND, *arguments)
    assert (answer.code, answer.out) == (code, "") and message in " ".join(answer.err.split())
    assert "Traceback" not in answer.err and not (project / "saved").exists()


def test_folder_that_is_not_ours(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMMAND[:-1], ".")
    assert answer.code == 1 and "holds other things than a saved model" in answer.err


def test_data_that_does_not_fit(sparsebit: Sparsebit, project: Path) -> None:
    save_file({"x": torch.zeros(4, 1, 8, 8)}, "data.safetensors")
    answer = sparsebit(*COMMAND, "--data", "data.safetensors")
    assert answer.code == 1
    assert "the float model cannot run this data (x=(4, 1, 8, 8) float32): RuntimeError" in answer.err


@pytest.mark.parametrize("before", [False, True], ids=["new folder", "old folder"])
def test_interrupt_while_saving(
    sparsebit: Sparsebit, project: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    if before:
        assert sparsebit(*COMMAND).code == 0
        old = {file.name: file.read_bytes() for file in (project / "saved").iterdir()}

    def half(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tensor_files, "serialize_file", half)
        answer = sparsebit(*COMMAND, "--config", "virtual")
    assert answer.code == 130
    assert [name for name in os.listdir(project) if name.startswith(".")] == []
    if before:
        assert {file.name: file.read_bytes() for file in (project / "saved").iterdir()} == old
    else:
        assert not (project / "saved").exists()


SLOW = """
import pathlib, time, torch
def slow():
    for index in range(1000):
        if index == 2:
            pathlib.Path("calibrating").touch()
        if index > 1:
            time.sleep(0.05)
        yield torch.randn(2, 3, 8, 8)
"""


class TestProcess:
    """Real processes, where signals and streams are real."""

    @staticmethod
    def start(root: Path, *arguments: str) -> subprocess.Popen[str]:
        # A shell that starts tests in the background makes them, and their children, deaf to SIGINT: undo that.
        code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        code += "from sparsebit.cli.main import app; app(prog_name='sparsebit')"
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def test_json_alone_on_stdout(self, project: Path, project_root: Path) -> None:
        process = self.start(project_root, *COMMAND, "--json")
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert json.loads(out)["coverage"]["num_weighted"] == 3 and "chatter" in err

    def test_interrupt_while_calibrating(self, project: Path, project_root: Path) -> None:
        (project / "slow_data.py").write_text(SLOW)
        process = self.start(project_root, *COMMAND, "--data", "slow_data:slow", "--num-samples", "100000")
        deadline = time.monotonic() + 120
        while not (project / "calibrating").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert out == "" and err.endswith("interrupted: nothing was left half-written\n") and "Traceback" not in err
        assert set(os.listdir(project)) - {"__pycache__"} == {"own_project.py", "slow_data.py", "calibrating"}


@pytest.mark.slow
def test_a_measured_placement_is_kept_and_used_again(sparsebit: Sparsebit, project: Path) -> None:
    pytest.importorskip("onnxruntime")
    wanted = ("--placement", "measured", "--placement-seconds", "0", "--save-placement", "placement.json")
    answer = sparsebit(*COMMAND, *wanted, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["placement"]["runtime"] == "onnxruntime"
    again = sparsebit(*COMMAND, "--placement", "placement.json")
    assert again.code == 0, again.err
    assert "of float's time" in again.out


@pytest.mark.parametrize(
    ("wanted", "words"),
    [(("--save-placement", "p.json"), "--placement measured"), (("--placement", "absent.json"), "no such file")],
    ids=["nothing to save", "no file"],
)
def test_a_placement_that_cannot_be(sparsebit: Sparsebit, project: Path, wanted: tuple[str, ...], words: str) -> None:
    answer = sparsebit(*COMMAND, *wanted)
    assert answer.code != 0 and words in " ".join(answer.err.split())


def test_a_name_that_is_only_the_ending_is_a_file() -> None:
    assert read_outputs([Path("out/.onnx"), Path("saved")]) == (Path("saved"), Path("out/.onnx"))


def test_an_onnx_file_is_a_model(sparsebit: Sparsebit, project: Path) -> None:
    """`--model` takes a float file; its layers have the names of the file."""
    net = load_model("own_project:Net")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, free = torch.randn(2, 3, 8, 8), ({0: "n"},)
        torch.onnx.export(net, (x,), project / "net.onnx", dynamo=True, dynamic_shapes=free, verbose=False)
    command = ["net.onnx" if word == "own_project:Net" else word for word in COMMAND]
    answer = sparsebit(*command, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["weights"] == "those of the file net.onnx" and answer.json["output_sqnr_db"] > 25
    (project / "broken.onnx").write_bytes(b"no protobuf")
    refused = sparsebit(*["broken.onnx" if word == "net.onnx" else word for word in command])
    assert refused.code != 0 and "--model broken.onnx is not an ONNX file" in refused.err, refused.err
