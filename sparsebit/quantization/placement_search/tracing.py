"""`traced`: a calibrated model as a graph whose placements can be written as files and timed in its runtime."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sparsebit.deploy.audit.file_latency import Stopwatch
from sparsebit.deploy.exporting.to_onnx import flat_inputs, in_order
from sparsebit.deploy.programs.targets import TARGETS
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.deploy.sessions.runtime_sessions import require_runtime
from sparsebit.errors import ConfigError, DeploymentError
from sparsebit.execution.batches import Call, calls
from sparsebit.execution.sample_rows import find_sample_rows
from sparsebit.quantization.calibrating.model_state import check_ready, switched_on
from sparsebit.quantization.exporting.export import trace_onnx
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.ops.quant_opr import QShared
from sparsebit.quantization.placement_search.program_graph import ProgramGraph
from sparsebit.quantization.placement_search.traced_graph import TracedGraph

NUM_SAMPLES = 8
_LARGEST = 1 << 30  # bytes: candidates are kept in memory


@dataclass(frozen=True)
class Traced:
    """The graph, the timer of its files, the runtime's name, and the shapes of one sample.

    `is_profiled`: whether the runtime has a profiler for its kernels, whose times the costs of units are learned from.
    """

    graph: TracedGraph
    watch: Stopwatch
    runtime: str
    shapes: tuple[tuple[int, ...], ...]
    is_profiled: bool = True


def traced(
    qmodel: QuantModel,
    batches: Iterable[Any],
    verb: str,
    wish: str,
    num_threads: int = 1,
    stopwatch: Stopwatch | None = None,
) -> Traced:
    """The model traced once; files are timed and compared on its first samples.

    `verb`, `wish`: for messages, the called function and the user's request.
    """
    runtime = PROFILES[qmodel.config.BACKEND].timed_in
    if runtime is None:
        raise ConfigError(
            f"{wish} with BACKEND: {qmodel.config.BACKEND}: no runtime here runs its files in the time of the device; "
            "set BACKEND: onnxruntime or openvino, or measure on the machine that has it"
        )
    target = TARGETS.get(qmodel.config.BACKEND)
    if target is not None and target.is_folder:
        raise ConfigError(f"{wish} with BACKEND: {target.name}: its files are folders; set BACKEND: executorch")
    if target is not None:
        target.require()
    require_runtime(runtime)
    check_ready(qmodel, verb)
    samples = _samples(qmodel, batches, wish)
    args, kwargs = samples[0]
    with switched_on(qmodel):
        model, opset = trace_onnx(qmodel, (*args, kwargs) if args and kwargs else kwargs or args)
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    if size > _LARGEST:
        raise DeploymentError(
            f"{wish}: the float file would have {size / 1e9:.1f} GB, and candidates are kept in memory "
            f"(at most {_LARGEST / 1e9:.1f} GB); use the default placement"
        )
    shared = {m.name: m.input_quantizer.name for m in qmodel.model.modules() if isinstance(m, QShared)}
    arrays = [[tensor.detach().cpu().numpy() for tensor in flat_inputs(*sample)] for sample in samples]
    if target is None:
        graph = TracedGraph(model, opset, shared, pads_channels=qmodel.config.SCHEDULE.PAD_CHANNELS)
    else:
        graph = ProgramGraph(qmodel, samples[0], model, opset, shared)
    watch = stopwatch or Stopwatch(runtime, arrays, num_threads)
    return Traced(graph, watch, runtime, tuple(tuple(array.shape) for array in arrays[0]), target is None)


def _samples(qmodel: QuantModel, batches: Iterable[Any], wish: str) -> list[Call]:
    """The first samples, each as a call of its own: files are timed with single samples."""
    found: list[Call] = []
    signature = inspect.signature(qmodel.original.forward)
    for call in calls(batches, qmodel.original, qmodel.device):
        call = call[0], in_order(call[1], signature)
        samples = find_sample_rows(call, qmodel)
        found += [samples.of(call, [place]) for place in range(min(samples.count, NUM_SAMPLES - len(found)))]
        if len(found) >= NUM_SAMPLES:
            break
    if not found:
        raise ConfigError(f"{wish}: no batches were given; give those of the calibration")
    return found
