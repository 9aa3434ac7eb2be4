from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from sparsebit.deploy.sessions.runtime_sessions import EXACT, RUNTIMES, open_session
from sparsebit.errors import DeploymentError, MissingExtraError
from tests.deploy.exported_files import op_types
from tests.deploy.tiny_files import Tiny


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized convolution, for any number of images."""
    tiny = Tiny(("n", 8, 6, 6))
    y = tiny.quantized(tiny.conv(tiny.quantized("x")))
    return tiny.save(tmp_path_factory.mktemp("sessions") / "m.onnx", y)


def images(count: int = 2) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, 8, 6, 6)).astype(np.float32)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("form", ["path", "bytes"])
def test_a_file_or_a_model_in_memory(runtime: str, form: str, file: Path) -> None:
    pytest.importorskip(runtime)
    session = open_session(file.read_bytes() if form == "bytes" else file, runtime, num_threads=1)
    assert session.runtime == runtime and session.inputs == ("x",) and len(session.outputs) == 1
    assert session.input_types == {"x": "float32"} and session.input_shapes == {"x": (None, 8, 6, 6)}
    assert session.batch_size is None
    assert session.run({"x": images(3)})[0].shape == (3, 8, 6, 6)


def test_outputs_are_not_overwritten_by_the_next_run(file: Path) -> None:
    for runtime in RUNTIMES:
        pytest.importorskip(runtime)
        session = open_session(file, runtime)
        first = session.run({"x": images()})[0]
        kept = first.copy()
        session.run({"x": -images()})
        assert np.array_equal(first, kept), runtime


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_signals_have_a_stack_after_sessions_that_overlapped(file: Path) -> None:
    """Without one, Ctrl-C is a segmentation fault."""
    pytest.importorskip("openvino")
    first, second = (open_session(file, "openvino") for _ in range(2))
    del first
    del second
    gc.collect()
    stack = (ctypes.c_size_t * 3)()  # address, flags, size
    assert ctypes.CDLL(None).sigaltstack(None, stack) == 0
    mapped = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    assert not stack[0] or any(int(begin, 16) <= stack[0] < int(end, 16) for begin, end in mapped)


def test_without_optimization_nodes_stay_as_they_are(file: Path, tmp_path: Path) -> None:
    open_session(file, optimize=False, optimized_file=tmp_path / "plain.onnx")
    open_session(file, optimized_file=tmp_path / "fused.onnx")
    assert op_types(tmp_path / "plain.onnx") == op_types(file)
    assert op_types(tmp_path / "fused.onnx")["QLinearConv"] == 1


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_options_for_exact_numbers_are_known(runtime: str, file: Path) -> None:
    pytest.importorskip(runtime)
    assert open_session(file, runtime, options=EXACT[runtime]).run({"x": images()})


def test_a_fixed_batch_is_known(tmp_path: Path) -> None:
    tiny = Tiny((3, 8))
    session = open_session(tiny.save(tmp_path / "m.onnx", tiny.node("Relu", ["x"], "relu")))
    assert session.batch_size == 3


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(("rows", "expected"), [(4, 4), ("n", None)], ids=["fixed", "free"])
def test_the_batch_is_that_of_the_samples_not_of_a_mask_in_front_of_them(
    runtime: str, rows: int | str, expected: int | None, tmp_path: Path
) -> None:
    pytest.importorskip(runtime)
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("mask", (7, 7)), ("x", (rows, 7)))]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, (rows, 7))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "mask"], ["y"])], "g", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = open_session(model.SerializeToString(), runtime)
    assert session.output_shapes == {"y": (expected, 7)} and session.batch_size == expected


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_inputs_that_do_not_fit_are_a_clear_fault(runtime: str, file: Path) -> None:
    pytest.importorskip(runtime)
    session = open_session(file, runtime)
    with pytest.raises(DeploymentError, match="the model does not run in"):
        session.run({"x": np.zeros((1, 5, 6, 6), np.float32)})


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_is_no_model_is_a_clear_fault(runtime: str, tmp_path: Path) -> None:
    pytest.importorskip(runtime)
    (tmp_path / "m.onnx").write_text("not a model")
    with pytest.raises(DeploymentError, match=r"m\.onnx does not load in"):
        open_session(tmp_path / "m.onnx", runtime)
    with pytest.raises(DeploymentError, match=r"none\.onnx: no such file"):
        open_session(tmp_path / "none.onnx", runtime)


def test_an_unknown_runtime_names_the_known_ones(file: Path) -> None:
    with pytest.raises(DeploymentError, match=r"'tensorrt': none that runs here; allowed: onnxruntime, openvino"):
        open_session(file, "tensorrt")


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_missing_package_is_named(runtime: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, runtime, None)
    with pytest.raises(MissingExtraError, match=rf"'{runtime}', which is not installed: pip install .*{runtime}"):
        open_session(file, runtime)
