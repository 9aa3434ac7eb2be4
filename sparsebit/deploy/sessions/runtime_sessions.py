"""A model file opened in its runtime: an ONNX file in one of three, a program in the runtime that it is for.

All run on the CPU. Their own exceptions become DeploymentErrors with the first lines of the message. A new runtime is
a subclass of `Session` and a row in `open_session`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from sparsebit.deploy.onnx_graph.model_file import need_file
from sparsebit.deploy.sessions.executorch_session import ExecuTorchSession
from sparsebit.deploy.sessions.htp_simulator import PACKAGE as QNN
from sparsebit.deploy.sessions.htp_simulator import HtpNode, open_on_htp
from sparsebit.deploy.sessions.inductor_session import InductorSession
from sparsebit.deploy.sessions.litert_session import LiteRtSession
from sparsebit.deploy.sessions.session import File, Session
from sparsebit.errors import DeploymentError, MissingExtraError

RUNTIMES = ("onnxruntime", "openvino")  # of ONNX files
# Runtimes of compiled programs: a file (or its bytes) and a number of threads -> the session.
PROGRAM_SESSIONS: dict[str, Callable[[File, int], Session]] = {
    "executorch": ExecuTorchSession,
    "aot_inductor": InductorSession,
    "litert": LiteRtSession,
}
# Of ONNX files too: they compute what a device computes, in another time.
SIMULATORS = ("qnn",)
_MODULES = {"qnn": QNN, "litert": "ai_edge_litert", "aot_inductor": "torch"}
# By default both round the float activations before a weight-only linear to int8 (up to 1e-2 of the output off).
# With these options such a layer computes as the file defines: its integers times float activations.
EXACT = {
    "onnxruntime": {"session.qdq_matmulnbits_accuracy_level": "1"},
    "openvino": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"},
    "qnn": {},
}
# On x86 without VNNI, ONNX Runtime's sums of two 8-bit products clip at 16 bits; with this option it multiplies uint8
# by uint8, which is slower and exact. A file with weights that are dequantized for a float layer may not run with it.
UNCLIPPED = {"session.x64quantprecision": "1"}
# ONNX Runtime's fusions do not check whether a scale is one number, as their kernels (QLinearAdd, QLinearSigmoid,
# MatMulIntegerToFloat) require; these are the error messages of those kernels.
_OF_ONE_SCALE = ("must be a scalar", "IsScalarOr1ElementVector", "QlinearBuildLookupTable")
_PLAIN_ADVICE = (
    "it has activations with a scale per channel, which ONNX Runtime fuses into kernels that take one scale; open it "
    "with the session option session.disable_quant_qdq=1 (or with ORT_ENABLE_BASIC), or quantize activations per tensor"
)


def open_session(
    file: File,
    runtime: str = "onnxruntime",
    *,
    num_threads: int = 0,
    optimize: bool = True,
    optimized_file: Path | None = None,
    options: Mapping[str, str] | None = None,
    profile_prefix: str | None = None,
) -> Session:
    """Open an ONNX file (a path, or a serialized model) in a runtime, on the CPU.

    `num_threads`: 0 lets the runtime choose. `optimize=False`: every node runs as it is written, which makes a QDQ
    file its own simulation (ONNX Runtime only). `optimized_file`: path to which ONNX Runtime writes the graph that it
    executes. `options`: the runtime's own (session config entries; options of OpenVINO or QNN). `profile_prefix`: ONNX
    Runtime times its kernels and writes them to a file of this name when `session.end_profiling()` is called.
    A program of another runtime (`executorch`) has none of the last four.
    """
    if not isinstance(file, bytes):
        need_file(file)
    if runtime == "onnxruntime":
        return _OnnxRuntime(file, num_threads, optimize, optimized_file, options or {}, profile_prefix)
    check_runtime(runtime)
    if runtime == "qnn":
        return Qnn(file, num_threads, options or {})
    if runtime in PROGRAM_SESSIONS:
        return PROGRAM_SESSIONS[runtime](file, num_threads)
    return _OpenVino(file, num_threads, options or {})


def check_runtime(runtime: str) -> None:
    """Raise for an unknown runtime."""
    allowed = (*RUNTIMES, *SIMULATORS, *PROGRAM_SESSIONS)
    if runtime not in allowed:
        raise DeploymentError(f"runtime {runtime!r}: none that runs here; allowed: {', '.join(allowed)}")


def require_runtime(runtime: str) -> None:
    """Raise, before any work, if a runtime's package is not installed."""
    if importlib.util.find_spec(_MODULES.get(runtime, runtime)) is None:
        raise _missing(runtime)


def _imported(runtime: str) -> Any:
    try:
        return importlib.import_module(runtime)
    except Exception:  # a broken package raises anything
        raise _missing(runtime) from None


def _missing(runtime: str) -> MissingExtraError:
    purpose = "running a compiled program" if runtime in PROGRAM_SESSIONS else "running an ONNX file"
    package = _MODULES.get(runtime, runtime).replace("_", "-")
    return MissingExtraError(package, "onnx" if runtime == "onnxruntime" else runtime, purpose)


def runtime_version(runtime: str) -> str:
    """The installed version of a runtime's package."""
    return metadata.version(_MODULES.get(runtime, runtime))


class _OnnxRuntime(Session):
    runtime = "onnxruntime"

    def __init__(
        self,
        file: File,
        num_threads: int,
        optimize: bool,
        optimized_file: Path | None,
        options: Mapping[str, str],
        profile_prefix: str | None,
    ) -> None:
        onnxruntime = _imported("onnxruntime")
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        settings.intra_op_num_threads = num_threads
        level = onnxruntime.GraphOptimizationLevel
        settings.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
        if optimized_file is not None:
            settings.optimized_model_filepath = str(optimized_file)
        if profile_prefix is not None:
            settings.enable_profiling = True
            settings.profile_file_prefix = profile_prefix
        # Threads of an idle session would keep spinning, and slow down the one that is timed.
        settings.add_session_config_entry("session.force_spinning_stop", "1")
        for key, value in options.items():
            settings.add_session_config_entry(key, value)
        source = file if isinstance(file, bytes) else str(file)
        with _errors_named("load in ONNX Runtime", file):
            self.session = onnxruntime.InferenceSession(source, settings, providers=["CPUExecutionProvider"])
        self._read_ports()

    def _read_ports(self) -> None:
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        self.inputs, self.outputs = (tuple(value.name for value in values) for values in (inputs, outputs))
        self.input_types = {value.name: _numpy_name(value.type) for value in inputs}
        self.input_shapes, self.output_shapes = (
            {v.name: tuple(size if isinstance(size, int) else None for size in v.shape or ()) for v in values}
            for values in (inputs, outputs)
        )

    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        with _errors_named("run in ONNX Runtime"):
            return list(self.session.run(self.outputs, dict(feeds)))


class Qnn(_OnnxRuntime):
    """`nodes`: the graph that the HTP executes. `options`: those of the provider."""

    runtime = "qnn"

    def __init__(self, file: File, num_threads: int, options: Mapping[str, str]) -> None:
        settings = _imported("onnxruntime").SessionOptions()
        settings.intra_op_num_threads = num_threads
        source, name = (file, "the model") if isinstance(file, bytes) else (str(file), str(file))
        self.nodes: tuple[HtpNode, ...]
        self.session, self.nodes = open_on_htp(source, settings, options, name)
        self._read_ports()


class _OpenVino(Session):
    runtime = "openvino"

    def __init__(self, file: File, num_threads: int, options: Mapping[str, str]) -> None:
        core = _core(_imported("openvino"))
        settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
        if num_threads:
            settings["INFERENCE_NUM_THREADS"] = num_threads
        with _errors_named("load in OpenVINO", file):
            # b"" as the second argument marks a model in memory.
            model = core.read_model(file, b"") if isinstance(file, bytes) else core.read_model(str(file))
            self.compiled = core.compile_model(model, "CPU", {**settings, **options})
        self.request = self.compiled.create_infer_request()
        inputs, outputs = self.compiled.inputs, self.compiled.outputs
        self.inputs, self.outputs = (tuple(port.get_any_name() for port in ports) for ports in (inputs, outputs))
        self.input_types = {port.get_any_name(): _numpy_name(port.element_type.to_string()) for port in inputs}
        self.input_shapes, self.output_shapes = (
            {port.get_any_name(): _openvino_shape(port.partial_shape) for port in ports} for ports in (inputs, outputs)
        )

    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        with _errors_named("run in OpenVINO"):
            _check_shapes(feeds, self.input_shapes)
            found = self.request.infer(dict(feeds))
        return [found[port].copy() for port in self.compiled.outputs]


@functools.cache
def _core(openvino: Any) -> Any:
    """One for the whole process. Each core replaces the main thread's stack for signals and frees its own in the end:
    after two that overlapped, the next signal, such as Ctrl-C, ends the process with a segmentation fault.
    """
    return openvino.Core()


def _openvino_shape(shape: Any) -> tuple[int | None, ...]:
    if not shape.rank.is_static:  # even the number of dimensions is unknown
        return ()
    return tuple(dimension.get_length() if dimension.is_static else None for dimension in shape)


@contextlib.contextmanager
def _errors_named(what: str, file: File = b"") -> Any:
    """Raise a DeploymentError with the runtime's message, or a better one for known faults."""
    try:
        yield
    except Exception as error:  # the runtimes' own exception classes differ by version
        lines = [line for line in str(error).splitlines() if line.strip()]
        is_known = any(words in str(error) for words in _OF_ONE_SCALE)
        message = _PLAIN_ADVICE if is_known else "\n".join(lines[:3])
        name = "the model" if isinstance(file, bytes) else str(file)
        raise DeploymentError(f"{name} does not {what}: {message}") from error


def _check_shapes(feeds: Mapping[str, Any], expected: Mapping[str, tuple[int | None, ...]]) -> None:
    """Check the shapes, because on one core OpenVINO computes something for a wrong number of channels."""
    for name, shape in expected.items():
        found = feeds[name].shape if name in feeds else shape
        if len(shape) != len(found) or any(a not in (None, b) for a, b in zip(shape, found, strict=True)):
            raise ValueError(f"{name} has the shape {found}, and the file takes {shape} (None: any)")


_TYPE_NAMES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "boolean": "bool",
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"{sign}{bits}": f"{'int' if sign == 'i' else 'uint'}{bits}" for sign in "iu" for bits in (8, 16, 32, 64)},
}


def _numpy_name(kind: str) -> str:
    """`tensor(int64)`, `i64`, … -> `int64`."""
    return _TYPE_NAMES.get(kind, kind.removeprefix("tensor(").removesuffix(")"))
