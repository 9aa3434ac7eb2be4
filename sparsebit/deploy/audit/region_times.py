"""How long each fused region of an ONNX file takes in its runtime, by the runtime's own clock.

A region is one kernel of the runtime: a convolution with the activation that it absorbed, for example. Its layers
are the nodes of the file that it computes. Files of Sparsebit name them after the layers of the model. Conversions
between integers and floats and changes of the memory layout are regions without layers.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsebit.deploy.audit.onnxruntime_graph import Finder, arithmetic_of
from sparsebit.deploy.audit.openvino_graph import Executed
from sparsebit.deploy.onnx_graph.fusion_site import label
from sparsebit.deploy.onnx_graph.packages import onnx
from sparsebit.deploy.onnx_graph.qdq_graph import DEQUANTIZE, QUANTIZE, Graph, load_model
from sparsebit.deploy.sessions.cpu import cpu_name
from sparsebit.deploy.sessions.random_inputs import made_up_feeds
from sparsebit.deploy.sessions.runtime_sessions import open_session, runtime_version
from sparsebit.records.audit import Arithmetic

_KERNEL = "_kernel_time"
_NOT_LAYERS = (QUANTIZE, DEQUANTIZE, "Constant")


@dataclass(frozen=True)
class RegionTime:
    """One kernel of the runtime: the file's nodes that it computes, and the median of its time in milliseconds.

    `kernel`: the runtime's own name of the op (`QLinearConv`, `Reorder`). `layers` is empty for conversions and
    reorders; `behind` names the layer whose result such a kernel converts, if it is known.
    """

    kernel: str
    ms: float
    arithmetic: Arithmetic
    layers: tuple[str, ...] = ()
    behind: str = ""


@dataclass(frozen=True)
class RegionTimes:
    """All regions of one file, in the order of execution, and under which conditions they were measured.

    `total_ms`: the sum of the regions' medians, which one interrupted call does not change. `noise`: of whole calls,
    half the distance of the quartiles over the median, as a measure of the machine's load.
    """

    runtime: str
    runtime_version: str
    cpu: str
    num_threads: int
    num_rounds: int
    total_ms: float
    noise: float
    regions: tuple[RegionTime, ...]

    @property
    def conversion_ms(self) -> float:
        """Milliseconds of the regions without a layer."""
        return sum(region.ms for region in self.regions if not region.layers)

    def of_layer(self, layer: str) -> float:
        """Milliseconds of the regions that compute the layer; a region of several layers counts in equal parts."""
        return self.by_layer().get(layer, 0.0)

    def by_layer(self) -> dict[str, float]:
        """`of_layer` for every layer."""
        found: dict[str, float] = {}
        for region in self.regions:
            for layer in region.layers:
                found[layer] = found.get(layer, 0.0) + region.ms / len(region.layers)
        return found

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def region_times(
    files: Mapping[str, Path | bytes],
    *,
    runtime: str = "onnxruntime",
    num_threads: int = 1,
    num_rounds: int = 20,
    feeds: Mapping[str, Any] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, RegionTimes]:
    """The regions of every file, by the given names.

    All files are open at the same time and are called in turns, so that a busy machine slows them alike. `feeds`:
    arrays by input name; other inputs are random, with open dimensions from `shapes`. Files may be paths or serialized
    models.
    """
    watch = _WatchedOnnxRuntime if runtime == "onnxruntime" else _WatchedOpenVino
    with tempfile.TemporaryDirectory() as folder:
        watched = [watch(file, num_threads, Path(folder) / str(place)) for place, file in enumerate(files.values())]
        arrays = [made_up_feeds(one.graph.model, feeds=feeds, shapes=shapes)[0] for one in watched]
        for done in range(num_rounds + 2):
            pairs = list(zip(watched, arrays, strict=True))
            # Every other round runs in reverse, because a call finds the caches as the one before it left them.
            for one, given in pairs if done % 2 == 0 else reversed(pairs):
                one.call(given, counts=done >= 2)  # the first two warm up
        conditions = (runtime, runtime_version(runtime), cpu_name(), num_threads, num_rounds)
        found = {}
        for name, one in zip(files, watched, strict=True):
            regions, totals = one.regions()
            low, middle, high = statistics.quantiles(totals, n=4, method="inclusive") if totals[1:] else totals * 3
            noise, total_ms = (high - low) / 2 / middle if middle else 0.0, sum(region.ms for region in regions)
            found[name] = RegionTimes(*conditions, total_ms, noise, tuple(regions))
        return found


def _graph_of(file: Path | bytes) -> Graph:
    return Graph(load_model(onnx.load_model_from_string(file) if isinstance(file, bytes) else file))


class _WatchedOnnxRuntime:
    """A session that writes its profile, and the graph that it executes."""

    def __init__(self, file: Path | bytes, num_threads: int, folder: Path) -> None:
        folder.mkdir()
        self.graph = _graph_of(file)
        optimized = folder / "optimized.onnx"
        self.session: Any = open_session(
            file, num_threads=num_threads, optimized_file=optimized, profile_prefix=str(folder / "profile")
        )
        self.optimized = Graph(onnx.load(str(optimized), load_external_data=False))
        self.counted: list[bool] = []

    def call(self, feeds: Mapping[str, Any], *, counts: bool) -> None:
        self.session.run(feeds)
        self.counted.append(counts)

    def regions(self) -> tuple[list[RegionTime], list[float]]:
        samples = _samples(json.loads(Path(self.session.session.end_profiling()).read_text()))
        layers = _layers_by_kernel(self.graph, self.optimized)
        known = {node.name: node for node in self.optimized.nodes}
        regions = []
        num_calls = len(self.counted)
        totals = [0.0] * num_calls
        for (name, kernel), found in samples.items():
            # The profile has no marks between calls, so the executions of a kernel are divided evenly over the calls.
            per_call = len(found) / num_calls
            if per_call >= 1:  # a kernel in a loop runs several times a call
                sums = [sum(found[round(i * per_call) : round((i + 1) * per_call)]) for i in range(num_calls)]
            else:
                sums = found
            for place, value in enumerate(sums):
                totals[place] += value
            node, mine = known.get(name), layers.get(name, ())
            counted = [value for value, counts in zip(sums, self.counted, strict=False) if counts] or sums
            arithmetic: Arithmetic = "unknown" if node is None else arithmetic_of(self.optimized, node)
            behind = "" if node is None or mine else _layer_in_front(node, self.optimized, layers)
            regions.append(RegionTime(kernel, statistics.median(counted), arithmetic, mine, behind))
        return regions, [total for total, counts in zip(totals, self.counted, strict=True) if counts]


def _samples(events: list[dict[str, Any]]) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of every execution, by the kernel's name and op, in the order of the first call."""
    found: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event.get("cat") == "Node" and str(event.get("name", "")).endswith(_KERNEL):
            key = str(event["name"]).removesuffix(_KERNEL), str(event["args"]["op_name"])
            found.setdefault(key, []).append(event["dur"] / 1e3)
    return found


def _layers_by_kernel(graph: Graph, optimized: Graph) -> dict[str, tuple[str, ...]]:
    """The nodes of the file that each kernel computes."""
    finder, found = Finder(graph, optimized), dict[str, list[str]]()
    for node in graph.nodes:
        kernel = finder.find(node) if node.op_type not in _NOT_LAYERS else None
        if kernel is not None and (kernel.op_type not in _NOT_LAYERS or kernel.name == node.name):
            found.setdefault(kernel.name, []).append(label(node))
    return {name: tuple(layers) for name, layers in found.items()}


def _layer_in_front(node: Any, optimized: Graph, layers: Mapping[str, tuple[str, ...]]) -> str:
    """The last layer of the nearest kernel, up to 4 nodes before this one along the first inputs."""
    for _ in range(4):
        node = optimized.producer.get(node.input[0]) if node.input else None
        if node is None or node.name in layers:
            return "" if node is None else layers[node.name][-1]
    return ""


class _WatchedOpenVino:
    """A compiled model with performance counters."""

    def __init__(self, file: Path | bytes, num_threads: int, folder: Path) -> None:
        self.graph = _graph_of(file)
        self.session: Any = open_session(file, "openvino", num_threads=num_threads, options={"PERF_COUNT": "YES"})
        self.samples: dict[tuple[str, str], list[float]] = {}
        self.totals: list[float] = []

    def call(self, feeds: Mapping[str, Any], *, counts: bool) -> None:
        self.session.run(feeds)
        if not counts:
            return
        infos = [
            info for info in self.session.request.profiling_info if re.search(r"(?<!NOT_)EXECUTED$", str(info.status))
        ]
        times = [info.real_time.total_seconds() * 1e3 for info in infos]
        for info, ms in zip(infos, times, strict=True):
            self.samples.setdefault((str(info.node_name), f"{info.node_type} {info.exec_type}"), []).append(ms)
        self.totals.append(sum(times))

    def regions(self) -> tuple[list[RegionTime], list[float]]:
        executed = Executed(self.session, self.graph)
        layers: dict[str, list[str]] = {}
        for node in self.graph.nodes:
            op = executed.op_of(node) if node.op_type not in _NOT_LAYERS else None
            if op is not None:
                layers.setdefault(op.name, []).append(label(node))
        return [
            RegionTime(kernel, statistics.median(found), executed.arithmetic_of(name), tuple(layers.get(name, ())))
            for (name, kernel), found in self.samples.items()
        ], self.totals
