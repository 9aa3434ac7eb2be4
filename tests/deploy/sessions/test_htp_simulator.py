from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from sparsebit.deploy.sessions import htp_simulator
from sparsebit.deploy.sessions.htp_simulator import HtpNode
from sparsebit.deploy.sessions.native_output import native_output_read
from sparsebit.deploy.sessions.runtime_sessions import open_session, require_runtime
from sparsebit.errors import DeploymentError, MissingExtraError
from tests.deploy.tiny_files import Tiny

LOG = (
    "[W:onnxruntime] QNN.backendValidateOpConfig() failed for node `fc` of type `FullyConnected` with error code 3110\n"
    "[E:onnxruntime] Unsupported nodes in QNN EP: { name: fc, type: Gemm }{ name: erf, type: Erf }, \n"
)


def test_refused_nodes_are_named(tmp_path: Path) -> None:
    why = htp_simulator._why("FAIL: nodes are assigned to the CPU", LOG, str(tmp_path))
    assert why.startswith("it refuses Gemm fc (QNN: error 3110 for FullyConnected), Erf erf; quantize")


def test_a_graph_that_is_not_compiled_names_its_float_nodes(tmp_path: Path) -> None:
    tensors = {"a": {"data_type": 0x0408}, "b": {"data_type": 0x0232}}
    nodes = {
        "look_up": {"type": "Gather", "input_names": ["b"], "output_names": ["b"]},
        "add": {"type": "ElementWiseAdd", "input_names": ["a", "a"], "output_names": ["a"]},
    }
    (tmp_path / "g.json").write_text(json.dumps({"graph": {"nodes": nodes, "tensors": tensors}}))
    (tmp_path / "log.json").write_text(json.dumps({"graph_name": "g"}))
    assert htp_simulator._graph(tmp_path) == (
        HtpNode("look_up", "Gather", ("b",), True),
        HtpNode("add", "ElementWiseAdd", ("a",), False),
    )
    why = htp_simulator._why("EP_FAIL : Failed to finalize QNN graph. Error: MEM_ALLOC", LOG, str(tmp_path))
    assert why.startswith("EP_FAIL : Failed to finalize") and why.endswith("most often: Gather look_up")


def test_output_of_native_code_is_kept_from_the_streams(capfd: pytest.CaptureFixture[str]) -> None:
    with native_output_read() as read:
        os.write(1, b"native\n")
        assert read() == "native\n"
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    htp_simulator._device.cache_clear()
    monkeypatch.setitem(sys.modules, htp_simulator.PACKAGE, None)
    tiny = Tiny((1, 8, 6, 6))
    file = tiny.save(tmp_path / "m.onnx", tiny.quantized(tiny.conv(tiny.quantized("x"))))
    with pytest.raises(MissingExtraError, match="needs the package 'onnxruntime-qnn'"):
        open_session(file, "qnn")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="needs the package 'onnxruntime-qnn'"):
        require_runtime("qnn")


@pytest.fixture
def simulator() -> None:
    pytest.importorskip(htp_simulator.PACKAGE, reason="the simulator of Qualcomm's HTP: the extra qnn")


@pytest.mark.usefixtures("simulator")
def test_a_unit_runs_in_integers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny = Tiny((1, 8, 6, 6))
    file = tiny.save(tmp_path / "m.onnx", tiny.quantized(tiny.conv(tiny.quantized("x"))))
    session = open_session(file, "qnn", num_threads=1)
    assert session.runtime == "qnn" and session.inputs == ("x",) and session.batch_size == 1
    assert [node.op for node in session.nodes if not node.is_float and "Conv" in node.op] == ["Conv2d"]  # type: ignore[attr-defined]
    x = np.random.default_rng(0).normal(size=(1, 8, 6, 6)).astype(np.float32)
    (found,), (expected,) = session.run({"x": x}), open_session(file, optimize=False).run({"x": x})
    assert abs(found - expected).max() <= 0.02 * np.ptp(expected)
    assert not any(capfd.readouterr())


@pytest.mark.usefixtures("simulator")
def test_a_node_that_the_htp_lacks_is_named(tmp_path: Path) -> None:
    tiny = Tiny((1, 8, 6, 6))
    file = tiny.save(tmp_path / "m.onnx", tiny.quantized(tiny.node("Erf", [tiny.quantized("x")], "erf")))
    with pytest.raises(DeploymentError, match=r"m.onnx does not run on the HTP: it refuses Erf erf"):
        open_session(file, "qnn")
