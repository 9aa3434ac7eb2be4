"""`quantize --output model.onnx`: what is written, what is found, and what happens to a file that is wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Sparsebit

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import onnx

from sparsebit.cli.inputs.loading import load_model
from sparsebit.cli.option_groups import FileOptions
from sparsebit.cli.options import Names
from sparsebit.cli.outputs.onnx_output import Exported, checked_file, require
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.errors import DeploymentError, MissingExtraError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.exporting import export as exporting
from sparsebit.records.audit import Audit, Latency

COMMAND = ("quantize", "-m", "own_project:Net", "-d", "own_project:batches", "--device", "cpu")


def scaled(file: Path, initializer: str, factor: float) -> None:
    """Multiplies one initializer of a file in place."""
    model = onnx.load(file)
    (tensor,) = [tensor for tensor in model.graph.initializer if tensor.name == initializer]
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * factor, initializer))
    onnx.save(model, file)


def hidden(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


@pytest.mark.exact_sums
def test_file_and_folder(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMMAND, "-o", "net.onnx", "-o", "saved")
    assert answer.code == 0, answer.err
    assert "writing net.onnx and comparing it with the simulation" in answer.err
    text = " ".join(answer.out.split())
    assert "saved saved" in text and "file net.onnx, " in text and "of the float weights" in text
    assert "parity bit-exact in onnxruntime against the simulation, on 24 samples" in text
    assert "runs All 2 convolutions and 1 linear layer run in integers" in text
    assert re.search(r"time [\d.]+ of float, measured on this machine", text)
    session, x = open_session("net.onnx"), torch.randn(1, 3, 8, 8)
    assert session.inputs == ("x",) and session.batch_size == 1
    qmodel = QuantModel.load("saved", load_model("own_project:Net"))
    assert torch.equal(torch.from_numpy(session.run({"x": x.numpy()})[0]), qmodel(x)) and hidden(project) == []


@pytest.mark.slow
def test_options_and_json(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(
        *(*COMMAND, "--json", "-o", "net.onnx", "--dynamic-batch", "--input-names", "pixels", "--opset", 22),
        *("--output-names", "scores", "--extra-info"),
    )
    assert answer.code == 0, answer.err
    record = answer.json["onnx"]
    assert record["bytes"] == (project / "net.onnx").stat().st_size and record["file"] == "net.onnx"
    assert record["ratio"] == pytest.approx(record["bytes"] / answer.json["weight_bytes"]["float"])
    assert record["parity"]["is_exact"] and record["audit"]["counts"] == {"integer": 3}
    assert answer.json["output"] is None and record["tensorrt_advice"] is None
    session = open_session("net.onnx")
    assert (session.inputs, session.outputs, session.batch_size) == (("pixels",), ("scores",), None)
    model = onnx.load("net.onnx")
    assert model.opset_import[0].version == 22
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert "sparsebit.sites" in {entry.key for entry in onnx.load("net_extra.onnx").metadata_props}


def test_batch_of_one_can_be_dynamic(sparsebit: Sparsebit, project: Path) -> None:
    (project / "one.py").write_text("import torch\ndef batches():\n    yield torch.randn(1, 4), torch.randn(1, 4)\n")
    answer = sparsebit("quantize", "-m", "own_project:Pair", "-d", "one:batches", "-o", "pair.onnx", "--dynamic-batch")
    assert answer.code == 0, answer.err
    session = open_session("pair.onnx")
    assert session.inputs == ("query", "key")
    assert {shape[0] for shape in session.input_shapes.values()} == {None}
    sys.modules.pop("one", None)


@pytest.mark.slow
@pytest.mark.exact_sums
def test_openvino(sparsebit: Sparsebit, project: Path) -> None:
    pytest.importorskip("openvino")
    answer = sparsebit(*COMMAND, "-c", "openvino", "-o", "net.onnx", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["onnx"]["parity"]["runtime"] == "openvino" and answer.json["onnx"]["audit"]["counts"]


@pytest.mark.usefixtures("project")
class TestGate:
    """A file that does not compute what was simulated."""

    @pytest.fixture
    def broken_writer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        write = exporting.write

        def broken(model: Any, path: Path) -> None:
            write(model, path)
            scaled(path, "body.0.weight/scale", 2)

        monkeypatch.setattr(exporting, "write", broken)

    @pytest.mark.exact_sums
    def test_keeps_the_older_file(self, sparsebit: Sparsebit, project: Path, broken_writer: None) -> None:
        (project / "net.onnx").write_text("older")
        answer = sparsebit(*COMMAND, "-o", "net.onnx", "-o", "saved", "--overwrite")
        assert answer.code == 1 and answer.out == ""
        assert "net.onnx does not compute what was simulated (onnxruntime)" in answer.err
        assert "the first site that differs is body.0.output" in answer.err
        assert (project / "net.onnx").read_text() == "older" and hidden(project) == []
        assert (project / "saved" / "sparsebit.json").is_file()

    def test_can_be_switched_off(self, sparsebit: Sparsebit, project: Path, broken_writer: None) -> None:
        answer = sparsebit(*COMMAND, "-o", "net.onnx", "--no-check")
        assert answer.code == 0 and "not checked" in answer.out and "integers" not in answer.out
        assert "with the simulation" not in answer.err and (project / "net.onnx").is_file()


class TestTensorRT:
    def test_follows_the_rules(self, sparsebit: Sparsebit, project: Path) -> None:
        answer = sparsebit(*COMMAND, "-c", "tensorrt", "-o", "net.onnx")
        assert answer.code == 0, answer.err
        assert "node by node" in answer.out and "follows TensorRT's rules" in answer.out

    def test_what_it_would_refuse_is_not_kept(
        self, sparsebit: Sparsebit, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write = exporting.write

        def broken(model: Any, path: Path) -> None:
            write(model, path)
            scaled(path, "body.0.weight/scale", -1)

        monkeypatch.setattr(exporting, "write", broken)
        answer = sparsebit(*COMMAND, "-c", "tensorrt", "-o", "net.onnx")
        assert answer.code == 1 and "net.onnx: TensorRT would refuse it:" in answer.err
        assert "body.0.weight" in answer.err and "a scale is not above 0" in answer.err
        assert not (project / "net.onnx").exists() and hidden(project) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-o", "no/such/net.onnx"], "does not exist; create it first"),
        (["-o", "folder.onnx"], "is a folder; name a file in it"),
    ],
    ids=["nowhere", "folder"],
)
def test_place_is_checked_before_any_work(sparsebit: Sparsebit, project: Path, arguments: list[str], told: str) -> None:
    (project / "folder.onnx").mkdir()
    answer = sparsebit(*COMMAND, *arguments)
    assert answer.code == 1 and told in answer.err and "calibrating" not in answer.err


@pytest.mark.parametrize("opset", [99])
def test_opset_that_cannot_be_written(sparsebit: Sparsebit, project: Path, opset: int) -> None:
    answer = sparsebit(*COMMAND, "-o", "net.onnx", "--opset", opset)
    assert answer.code == 1 and f"opset_version={opset}" in answer.err and "21" in answer.err
    assert not (project / "net.onnx").exists()


def test_names_that_do_not_fit(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMMAND, "-o", "net.onnx", "--input-names", "a,b")
    assert answer.code == 1 and "input_names=('a', 'b'); allowed: a list of up to 1 names" in answer.err
    assert "calibrating" not in answer.err  # told before any work
    answer = sparsebit(*COMMAND, "-o", "net.onnx", "--input-names", "a,,b")
    assert answer.code == 2 and "write names that differ" in " ".join(answer.err.split())


def test_names_follow_forward_whatever_the_data_s_order_is(sparsebit: Sparsebit, project: Path) -> None:
    """The table has as many rows as the network wants, the image as many as there are samples."""
    (project / "two.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.head = torch.nn.Linear(4, 3)\n"
        "    def forward(self, table, image):\n        return self.head(image) + table.sum()\n"
        "def batches():\n"
        "    for _ in range(2):\n        yield {'image': torch.randn(3, 4), 'table': torch.randn(5, 2)}\n"
    )
    command = ("quantize", "-m", "two:Net", "-d", "two:batches", "--device", "cpu", "-o", "two.onnx", "--dynamic-batch")
    answer = sparsebit(*command, "--input-names", "rows,pixels", "--no-check")
    assert answer.code == 0, answer.err
    assert open_session("two.onnx").input_shapes == {"rows": (5, 2), "pixels": (None, 4)}
    answer = sparsebit(*command, "--input-names", "image")
    assert answer.code == 1 and "also from those that stay; in order they rename table, image" in answer.err
    sys.modules.pop("two", None)


class TestPackages:
    def test_missing_one_is_named_before_any_work(
        self, sparsebit: Sparsebit, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "onnxscript", None)
        answer = sparsebit(*COMMAND, "-o", "net.onnx")
        assert answer.code == 1 and "pip install 'onnx-ir>=" in answer.err and "calibrating" not in answer.err

    def test_runtime_is_needed_for_the_check_only(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "openvino", None)
        assert checked_file(tmp_path / "net.onnx", "openvino", FileOptions(no_check=True)) == tmp_path / "net.onnx"
        with pytest.raises(MissingExtraError, match=r"'openvino'.*pip install "):
            checked_file(tmp_path / "net.onnx", "openvino", FileOptions())

    def test_extra_of_the_caller(self) -> None:
        require("onnx", "onnx_ir")
        with pytest.raises(MissingExtraError, match=r"'no-such-package'.*pip install "):
            require("no_such_package", extra="demo")


def test_options_as_typed() -> None:
    assert FileOptions().given() == []
    assert FileOptions(20, True, Names(["x"]), no_check=True).given() == [
        "--opset",
        "--dynamic-batch",
        "--input-names",
        "--no-check",
    ]


def test_unwritable_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DeploymentError, match="does not exist"):
        checked_file(tmp_path / "file" / "net.onnx", "onnxruntime", FileOptions())


# The third walk through the data is that of the gate, when the file is written but not yet in its place.
STALLING = """
import pathlib, time, torch
walks = 0
def batches():
    global walks
    walks += 1
    torch.manual_seed(1)
    yield torch.randn(4, 3, 8, 8)
    if walks == 3:
        pathlib.Path("gate").touch()
        time.sleep(120)
"""


class TestForeignFiles:
    """Files that Sparsebit did not write stay, unless --overwrite says otherwise."""

    @staticmethod
    def foreign(path: Path, producer: str) -> None:
        graph = onnx.helper.make_graph([], "other", [], [])
        onnx.save(onnx.helper.make_model(graph, producer_name=producer), path)

    @pytest.mark.parametrize(("producer", "words"), [("pytorch", "by pytorch"), ("", "by an unknown program")])
    def test_are_kept(self, sparsebit: Sparsebit, project: Path, producer: str, words: str) -> None:
        self.foreign(project / "net.onnx", producer)
        before = (project / "net.onnx").read_bytes()
        for verb in (COMMAND, ("export", "-m", "own_project:Net", "--size", "8")):
            answer = sparsebit(*verb, "-o", "net.onnx")
            assert answer.code == 1 and f"was written {words}, not by sparsebit" in answer.err, answer.err
            assert "give another name, or --overwrite" in answer.err
            assert (project / "net.onnx").read_bytes() == before

    def test_of_any_kind(self, project: Path) -> None:
        options = FileOptions(no_check=True)
        (project / "text.onnx").write_text("version https://git-lfs.github.com/spec/v1")
        with pytest.raises(DeploymentError, match="exists and is not an ONNX file"):
            checked_file(project / "text.onnx", "virtual", options)
        self.foreign(project / "net_extra.onnx", "pytorch")
        with pytest.raises(DeploymentError, match=r"net_extra\.onnx exists and was written by pytorch"):
            checked_file(project / "net.onnx", "virtual", replace(options, extra_info=True))
        checked_file(project / "net.onnx", "virtual", options)
        (project / "empty.onnx").touch()
        checked_file(project / "empty.onnx", "virtual", options)
        checked_file(project / "text.onnx", "virtual", replace(options, overwrite=True))
        self.foreign(project / "own.onnx", "sparsebit")
        checked_file(project / "own.onnx", "virtual", options)

    def test_a_float_file_of_ours_is_replaced(self, sparsebit: Sparsebit, project: Path) -> None:
        export = ("export", "-m", "own_project:Net", "--size", "8", "-o", "net.onnx")
        assert sparsebit(*export).code == 0 and sparsebit(*export).code == 0


class TestKilled:
    """Real processes, stopped while the file is being checked."""

    @pytest.fixture
    def process(self, project: Path, project_root: Path) -> subprocess.Popen[str]:
        (project / "stalling.py").write_text(STALLING)
        (project / "net.onnx").write_text("older")
        # A shell that starts tests in the background makes them, and their children, deaf to SIGINT: undo that.
        code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        code += "from sparsebit.cli.main import app; app(prog_name='sparsebit')"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *COMMAND, "--data", "stalling:batches", "-o", "net.onnx", "--overwrite"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(project_root), "OMP_NUM_THREADS": "1"},
        )
        deadline = time.monotonic() + 240
        while not (project / "gate").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(hidden(project)) == 1  # where the new file lies until it has passed
        assert (project / "net.onnx").read_text() == "older"  # what a kill that no process survives would leave
        return process

    @pytest.mark.parametrize(
        ("number", "code"),
        [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
        ids=["INT", "TERM"],
    )
    def test_leaves_nothing(self, process: subprocess.Popen[str], project: Path, number: int, code: int) -> None:
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (code, ""), err
        assert err.endswith("interrupted: nothing was left half-written\n") and "Traceback" not in err
        assert hidden(project) == [] and (project / "net.onnx").read_text() == "older"


def exported(ratio: float | None, untimed: str = "") -> Exported:
    latency = Latency(1, (1, 1), 1, (1, 1), 1, 1, 5, 1)
    found = Audit("net.onnx", "onnxruntime", "1", "cpu", 1, (), {}, 1)
    if ratio is not None:
        found = replace(found, latency={"float": latency, "quantized": replace(latency, cpu_ratio=ratio)})
    return Exported(Path("net.onnx"), 1, 4, audit=found, untimed=untimed)


def test_how_the_time_compares_with_float() -> None:
    assert exported(0.43).time == "0.43 of float, measured on this machine (CPU time, 1 thread)"
    assert exported(0.43).warnings() == () and exported(1.02).warnings() == ()
    (warning,) = exported(1.44).warnings()
    assert "slower than float here (1.44 of its time)" in warning and "--placement measured" in warning
    (warning,) = exported(1.44).warnings(placement="profile.json")
    assert "--placement measured" not in warning and "another machine" in warning
    assert exported(None, "--no-check").time == "not measured: --no-check"
    assert exported(1.44).to_dict()["time"]["ratio"] == 1.44


def test_a_table_with_as_many_rows_as_the_batch_has_samples_stays_whole(sparsebit: Sparsebit, project: Path) -> None:
    (project / "table_net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.head = torch.nn.Linear(4, 6)\n"
        "    def forward(self, table, image):\n        return self.head(image) @ table\n"
        "def batches():\n"
        "    for _ in range(2):\n        yield torch.eye(6), torch.randn(6, 4)\n"
    )
    command = ("quantize", "-m", "table_net:Net", "-d", "table_net:batches", "--device", "cpu", "-o")
    for file, rows, more in (("one.onnx", 1, ()), ("any.onnx", None, ("--dynamic-batch",))):
        answer = sparsebit(*command, file, *more)
        assert answer.code == 0, answer.err
        session = open_session(file)
        assert session.input_shapes == {"table": (6, 6), "image": (rows, 4)} and session.batch_size == rows
        answer = sparsebit("check", file, "-d", "table_net:batches")
        assert answer.code == 0, answer.err
    sys.modules.pop("table_net", None)
