"""`audit`: does a quantized file run in integers, is it faster than float, and if not, why?

The evidence is the graph that the runtime itself optimized (`onnxruntime_graph`, `openvino_graph`), not the file.
`fusion_reasons` explains each layer that runs in float, and `verdict` sums up. The float and the quantized file are
timed in turns: on a busy machine, times that are measured one after the other would favour one of them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsebit.deploy.audit import onnxruntime_graph as audit_onnxruntime
from sparsebit.deploy.audit import openvino_graph as audit_openvino
from sparsebit.deploy.audit import qnn_graph as audit_qnn
from sparsebit.deploy.audit.fusion_reasons import reason_for
from sparsebit.deploy.audit.layer_facts import LayerFacts
from sparsebit.deploy.audit.onnxruntime_graph import Execution
from sparsebit.deploy.audit.program_file import audit_program
from sparsebit.deploy.audit.region_times import region_times
from sparsebit.deploy.comparing.float_twin import float_twin
from sparsebit.deploy.comparing.verdict import verdict
from sparsebit.deploy.onnx_graph.fusion_site import FusionSite, is_heavy, is_layer, kind, label
from sparsebit.deploy.onnx_graph.model_file import num_bytes
from sparsebit.deploy.onnx_graph.packages import onnx
from sparsebit.deploy.onnx_graph.qdq_graph import MOVES, TWO_GIGABYTES, Graph, load_model
from sparsebit.deploy.runtimes import owner_of
from sparsebit.deploy.sessions.cpu import cpu_name, is_arm, saturates
from sparsebit.deploy.sessions.random_inputs import made_up_feeds
from sparsebit.deploy.sessions.runtime_sessions import SIMULATORS, check_runtime, open_session, runtime_version
from sparsebit.deploy.sessions.session import Session
from sparsebit.deploy.sessions.timing import interleaved
from sparsebit.errors import DeploymentError
from sparsebit.records.audit import Audit, Latency, LayerRun
from sparsebit.records.phases import phase

_NUM_NAMES = 3
# Timing single layers takes this share of the time for whole calls, in at least and at most so many rounds.
_LAYERS_SHARE, _FEWEST_ROUNDS, _MOST_ROUNDS = 0.15, 3, 20
_KEEP_FLOAT = (
    "what the file keeps in float is not computed in float; export_onnx of this release keeps it so, or open the "
    "session with session.disable_quant_qdq=1, which runs everything in float"
)
_MOVING = MOVES | {"Concat", "Gather", "MaxPool", "Pad", "Resize", "Slice", "Split"}
_EXECUTED = {
    "onnxruntime": audit_onnxruntime.executed,
    "openvino": audit_openvino.executed,
    "qnn": audit_qnn.executed,
}
_SATURATION = (
    "this CPU has no VNNI: sums of uint8 x int8 products may clip at 16 bits, which costs accuracy; compare the file's "
    "accuracy here with the simulation's, or deploy where there is VNNI"
)


@phase("audit")
def audit(
    file: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    runtime: str = "onnxruntime",
    feeds: Mapping[str, Any] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    num_threads: int = 1,
    repeats: int | None = None,
    budget_s: float = 5.0,
) -> Audit:
    """Open a quantized ONNX file in its runtime, read the runtime's own graph, and time it against float in turns.

    `against`: the float file; without it the quantized file with its quantization taken out (`float_twin`).
    `feeds`: arrays by input name; other inputs are random (`made_up_feeds`), with open dimensions from `shapes`.
    A program (`.pte`, `.pt2`) is opened in the runtime of its ending; it is timed only if `against` is given.
    `repeats`: rounds of timing; None: as many as fit in `budget_s`; 0: no timing. A simulator is never timed.
    """
    path = Path(file)
    if (owner := owner_of(path)) is not None:
        return audit_program(path, owner, against, feeds, (num_threads, repeats, budget_s))
    check_runtime(runtime)
    model = load_model(path)
    graph = Graph(_with_types(model))
    executed = _EXECUTED[runtime]
    with _named(path, graph) as named:
        execution, session = executed(named, graph, num_threads=num_threads)
    layers = _layers(graph, execution, runtime)
    found = Audit(
        file=str(file),
        runtime=runtime,
        runtime_version=runtime_version(runtime),
        cpu=cpu_name(),
        num_threads=num_threads,
        layers=layers,
        leftovers=execution.leftovers,
        num_bytes=num_bytes(path),
        warnings=tuple(_warnings(graph, layers, runtime)),
    )
    if repeats != 0 and runtime not in SIMULATORS:
        arrays, words = made_up_feeds(model, feeds=feeds, shapes=shapes)
        found = replace(found, feeds=words)
        found = _compared(found, model, against, session, arrays, repeats, budget_s)
    return replace(found, verdict=verdict(found))


def _layers(graph: Graph, execution: Execution, runtime: str) -> tuple[LayerRun, ...]:
    runs, facts = [], LayerFacts(graph)
    for node in filter(lambda node: is_layer(graph, node), graph.nodes):
        kernel, site = execution.kernels[label(node)], FusionSite(graph, node)
        run = LayerRun(
            *(label(node), node.op_type, kind(node.op_type), is_heavy(node.op_type), kernel.arithmetic, kernel.op),
            rounds_weight=kernel.rounds_weight,
            meant_float=site.is_meant_float,
            **facts.of(node),
        )
        if kernel.arithmetic == "unknown":
            run = replace(run, cause="it was not found in the runtime's graph")
        elif kernel.arithmetic == "float":
            run = replace(run, **vars(reason_for(site, runtime)))
        runs.append(run)
    return tuple(runs)


def _compared(
    found: Audit,
    model: Any,
    against: Any,
    session: Session,
    arrays: dict[str, Any],
    repeats: int | None,
    budget_s: float,
) -> Audit:
    """The audit with the size of the float file and the latencies of both files."""
    try:
        with _float_file(model, against) as (path, num_bytes):
            other = open_session(path, found.runtime, num_threads=found.num_threads)
            latency = _latency(session, other, arrays, repeats, budget_s)
            if set(other.inputs) == set(session.inputs):
                found = replace(found, layers=_timed(found, model, path, arrays, latency, budget_s))
    except DeploymentError as error:
        if against is not None:
            raise
        return replace(found, warnings=(*found.warnings, f"not compared with float: {error}"))
    source = "twin" if against is None else str(against)
    return replace(found, latency=latency, float_source=source, float_bytes=num_bytes)


def _latency(
    session: Session, other: Session, arrays: dict[str, Any], repeats: int | None, budget_s: float
) -> dict[str, Latency]:
    quantized = {name: arrays[name].astype(kind, copy=False) for name, kind in session.input_types.items()}
    if len(other.inputs) != len(session.inputs):
        raise DeploymentError(f"the float file takes {', '.join(other.inputs)}; this one {', '.join(session.inputs)}")
    have_same_names = set(other.inputs) == set(session.inputs)
    pairs = zip(other.inputs, other.inputs if have_same_names else session.inputs, strict=True)
    plain = {theirs: arrays[ours].astype(other.input_types[theirs], copy=False) for theirs, ours in pairs}
    runs = {"float": lambda: other.run(plain), "quantized": lambda: session.run(quantized)}
    return interleaved(runs, budget_s=budget_s, num_rounds=repeats)


def _timed(
    found: Audit, model: Any, float_file: Path, arrays: dict[str, Any], latency: dict[str, Latency], budget_s: float
) -> tuple[LayerRun, ...]:
    """The layers with their times in both files, measured by the runtime's own profiler."""
    if model.ByteSize() > TWO_GIGABYTES:
        return found.layers
    one_round_s = sum(timed.wall_ms for timed in latency.values()) / 1e3
    rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, round(_LAYERS_SHARE * budget_s / max(one_round_s, 1e-6))))
    files = {"quantized": model.SerializeToString(), "float": float_file}
    how: dict[str, Any] = {"num_threads": found.num_threads, "num_rounds": rounds, "feeds": arrays}
    times = {name: one.by_layer() for name, one in region_times(files, runtime=found.runtime, **how).items()}
    return tuple(
        replace(layer, ms=times["quantized"].get(layer.name), float_ms=times["float"].get(layer.name))
        for layer in found.layers
    )


@contextlib.contextmanager
def _float_file(model: Any, against: Any) -> Iterator[tuple[Path, int]]:
    """The float file and its size in bytes; a float twin is written to a temporary folder."""
    if against is not None:
        yield Path(against), num_bytes(Path(against))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = _saved(float_twin(model), Path(folder) / "float.onnx")
        yield path, sum(part.stat().st_size for part in path.parent.iterdir())


@contextlib.contextmanager
def _named(path: Path, graph: Graph) -> Iterator[Path]:
    """The file, or a copy in which every node has a unique name: layers are found in the runtime's graph by name."""
    names = [node.name for node in graph.nodes]
    if "" not in names and len(set(names)) == len(names):
        yield path
        return
    for node in graph.nodes:
        node.name = node.output[0]
    with tempfile.TemporaryDirectory() as folder:
        yield _saved(graph.model, Path(folder) / path.name)


def _saved(model: Any, path: Path) -> Path:
    large = model.ByteSize() > TWO_GIGABYTES
    onnx.save(model, path, save_as_external_data=large, location="weights.data" if large else None)
    return path


def _warnings(graph: Graph, layers: tuple[LayerRun, ...], runtime: str) -> Iterator[str]:
    """Warnings about this machine and this file."""
    multiplies = any(layer.heavy and layer.arithmetic == "integer" for layer in layers)
    if runtime in SIMULATORS:
        yield f"{runtime} is simulated here: a simulator's time says nothing about the device, so nothing was timed"
    elif saturates() and multiplies:
        yield _SATURATION
    elif is_arm() and multiplies:
        yield "this is an ARM processor: what is fused and how fast it is differs from x86; audit where you deploy"
    if rounded := [layer.name for layer in layers if layer.rounds_weight]:
        how = "to int8 by itself, with one scale for all channels"
        yield f"the runtime rounds the float weights of {_some(rounded)} {how}: {_KEEP_FLOAT}"
    if changed := [layer.name for layer in layers if _is_rounded_against_the_plan(layer, runtime)]:
        compare = ", or open the session with session.disable_quant_qdq=1 to compare the two"
        yield (
            f"{_some(changed)} {'is' if len(changed) == 1 else 'are'} meant to be computed in float, as the file notes,"
            " but the runtime computes in integers; the file is of an older release, or was changed after "
            f"its export: export it again{compare if runtime == 'onnxruntime' else ''}"
        )
    if any(item.HasField("g") for node in graph.nodes for item in node.attribute):
        yield "layers inside If, Loop and Scan are not examined"


def _is_rounded_against_the_plan(layer: LayerRun, runtime: str) -> bool:
    """Whether a layer that the export marked as float runs in integers; ops that only move values are exempt.

    OpenVINO's kernels for light ops read integers and compute in float; ONNX Runtime's have a separate rounding.
    """
    is_integer = layer.arithmetic in ("integer", "weight-only") and not layer.rounds_weight
    rounds = layer.heavy or runtime == "onnxruntime"
    return layer.meant_float and is_integer and rounds and layer.op not in _MOVING


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_NAMES} more" if len(names) > _NUM_NAMES else ""
    return ", ".join(names[:_NUM_NAMES]) + more


def _with_types(model: Any) -> Any:
    """The model with its values' types added, if ONNX can infer them."""
    try:
        return onnx.shape_inference.infer_shapes(model) if model.ByteSize() <= TWO_GIGABYTES else model
    except Exception:  # a runtime's own operators: keep the types in the file
        return model
