"""Opens a file in the simulator of Qualcomm's Hexagon tensor processor (HTP), with every node on the HTP.

`onnxruntime-qnn` is an execution provider that ONNX Runtime loads from a library; it comes with the simulator (x86) or
with the driver (Windows on Arm). Its native code writes to the process's output streams, and its log is the only
place that names the nodes that the HTP refuses, so both streams are read while a session opens.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebit.deploy.sessions.native_output import native_output_read
from sparsebit.errors import DeploymentError, MissingExtraError

PACKAGE = "onnxruntime_qnn"
_PROVIDER = "QNNExecutionProvider"
_NO_CPU = "session.disable_cpu_ep_fallback"
_WARNINGS = 2  # the level at which the log names what the HTP refuses
_UNSUPPORTED = re.compile(r"Unsupported nodes in QNN EP: (.*)")
_NODE = re.compile(r"\{ name: (.*?), type: (\w+) \}")
_INVALID = re.compile(r"failed for node `(.*?)` of type `(\w+)` with error code (\d+)")
_NOT_COMPILED = "Failed to finalize QNN graph"
_FLOATS = frozenset({0x0216, 0x0232})  # QNN_DATATYPE_FLOAT_16 and _32
_NUM_SHOWN = 5


@dataclass(frozen=True)
class HtpNode:
    """One node of the graph that the HTP executes. `outputs`: names of values, mostly those of the file."""

    name: str
    op: str
    outputs: tuple[str, ...]
    is_float: bool


def open_on_htp(
    source: str | bytes, settings: Any, options: Mapping[str, str], name: str
) -> tuple[Any, tuple[HtpNode, ...]]:
    """An `onnxruntime.InferenceSession`, and the graph that the HTP executes.

    `settings`: the `SessionOptions`; `options`: those of the provider; `name`: the file's name in messages.
    """
    onnxruntime, provider, device = _device()
    settings.log_severity_level = _WARNINGS
    settings.add_session_config_entry(_NO_CPU, "1")
    with tempfile.TemporaryDirectory() as folder, native_output_read() as read:
        dump = {"dump_json_qnn_graph": "1", "json_qnn_graph_dir": folder}
        settings.add_provider_for_devices([device], {"backend_path": provider.get_qnn_htp_path(), **dump, **options})
        try:
            session = onnxruntime.InferenceSession(source, settings)
        except Exception as error:  # the exception classes differ by version
            raise DeploymentError(f"{name} does not run on the HTP: {_why(str(error), read(), folder)}") from error
        return session, _graph(Path(folder))


@functools.cache
def _device() -> tuple[Any, Any, Any]:
    """ONNX Runtime, the provider's package and its device. Registering a provider twice in a process is an error."""
    onnxruntime = importlib.import_module("onnxruntime")
    try:
        provider = importlib.import_module(PACKAGE)
        if not (devices := _devices(onnxruntime)):  # the user's own code may have registered it
            onnxruntime.register_execution_provider_library(_PROVIDER, provider.get_library_path())
            devices = _devices(onnxruntime)
    except Exception:  # a broken package raises anything, and so does an ONNX Runtime without plug-ins
        raise MissingExtraError("onnxruntime-qnn", "qnn", "running a file on Qualcomm's HTP") from None
    if not devices:
        raise DeploymentError("onnxruntime-qnn finds no device and has no simulator here; it has one for x86-64 Linux")
    return onnxruntime, provider, devices[0]


def _devices(onnxruntime: Any) -> list[Any]:
    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == _PROVIDER]


def _why(error: str, log: str, folder: str) -> str:
    """The refused nodes, with the error code that QNN's validation returns for them."""
    codes = {node: f" (QNN: error {code} for {op})" for node, op, code in _INVALID.findall(log)}
    refused = [found for line in _UNSUPPORTED.findall(log)[:1] for found in _NODE.findall(line)]
    if refused and _NOT_COMPILED not in error:
        names = [f"{op} {node}{codes.get(node, '')}" for node, op in refused]
        return f"it refuses {_some(names)}; {_ADVICE}"
    first = next((line for line in error.splitlines() if line.strip()), "")
    floats = [f"{node.op} {node.name}" for node in _graph(Path(folder)) if node.is_float]
    where = f"; these nodes compute in float, which is where it fails most often: {_some(floats)}" if floats else ""
    return first + where


_ADVICE = "quantize what is around it (BACKEND: qnn does), or write the layer with ops that the HTP has"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return ", ".join(names[:_NUM_SHOWN]) + more


def _graph(folder: Path) -> tuple[HtpNode, ...]:
    """The nodes of all graphs that the provider wrote. Its order is alphabetical."""
    found = []
    for file in sorted(folder.glob("*.json")):
        graph = json.loads(file.read_text(encoding="utf-8")).get("graph")
        for name, node in (graph or {"nodes": {}})["nodes"].items():
            values = [*node["input_names"], *node["output_names"]]
            kinds = {graph["tensors"][value]["data_type"] for value in values if value in graph["tensors"]}
            found.append(HtpNode(name, node["type"], tuple(node["output_names"]), not kinds.isdisjoint(_FLOATS)))
    return tuple(found)
