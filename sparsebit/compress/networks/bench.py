"""`Bench`: the shared inputs of all candidates: the float model and its file, the data, the judge and the stopwatch.

It is built once per search (`compress.py`); `trial.py` makes candidates with it and `study.py` measures with it. Costs
are shares of the float file's cost in the same runtime, so `float_cost` is measured first. `Example` holds how the
model is called, and which sizes (batch, length) a file leaves open: those in which the calibration batches differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.compress.judging.judges import Judge, Model
from sparsebit.compress.judging.runtime_model import RuntimeModel
from sparsebit.deploy.audit.file_latency import Stopwatch, Timed
from sparsebit.deploy.exporting.node_names import tidy
from sparsebit.deploy.exporting.to_onnx import OnnxOptions, flat_inputs, in_order, input_names, to_onnx
from sparsebit.deploy.onnx_graph.model_file import num_bytes, staged, write
from sparsebit.deploy.programs.flat_program import flat_program
from sparsebit.deploy.programs.targets import TARGETS
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.errors import ConfigError
from sparsebit.execution.batches import Call, as_call
from sparsebit.execution.sample_rows import SampleRows, find_sample_rows
from sparsebit.folders import staged_result
from sparsebit.graph.values.nested import map_nested, tensors_of
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.records.ladder import Cost, LadderGoal
from sparsebit.sparse.budgets.model_size import model_size

Axes = dict[str, dict[int, str]]
_TIMING_S = 3.0


@dataclass(frozen=True)
class Example:
    """How the model is called: one batch, the float outputs on it, and which of its sizes a file leaves open.

    `num_samples`: of a file that leaves none open; 0: as many as the batch has.
    """

    call: Call
    outputs: Any
    rows: SampleRows
    axes: Axes | None
    num_samples: int = 0

    def with_samples(self, count: int) -> Call:
        """The call with this many samples; samples repeat if there are too few."""
        found: Call = self.rows.of(self.call, [row % self.rows.count for row in range(count)])
        return found

    @property
    def batch(self) -> Any:
        """The example that files are exported with. Two samples, because torch.export treats a size of 1 as fixed."""
        args, kwargs = self.with_samples(2 if self.axes else self.num_samples or self.rows.count)
        return kwargs or args

    def for_target(self, target: str, axes: Axes | None) -> Example:
        """With the sizes that files of the target leave open, of those that the model allows. A program takes one
        sample: its compiler plans memory for the largest batch.
        """
        profile = PROFILES[target]
        if target not in TARGETS:
            return replace(self, axes=axes if profile.open_sizes else None)
        varied = sorted({label for sizes in (axes or {}).values() for label in sizes.values()} - {"batch"})
        if varied:
            raise ConfigError(
                f"target={target!r}: batches differ in {len(varied)} sizes besides the number of samples, and a "
                f"{profile.ending} file is compiled for one; pad the batches to one size"
            )
        return replace(self, axes=None, num_samples=1 if axes else 0)


def example_of(model: nn.Module, batches: Sequence[Any]) -> Example:
    """The first batch as a call. Open sizes: the batch, and every size in which batches differ."""
    calls = [as_call(batch, model) for batch in batches]
    args, kwargs = map_nested(Tensor, torch.clone, calls[0])
    with torch.no_grad():
        outputs = model(*args, **kwargs)
    rows = find_sample_rows(calls[0], model, outputs)
    signature = inspect.signature(model.forward)
    named = [_named(call, signature) for call in calls]
    samples = {id(tensor) for tensor in rows.tensors(calls[0])}
    axes: Axes = {}
    names: dict[tuple[int, ...], str] = {}  # sizes that are equal in every batch are one size
    for name, tensor in named[0].items():
        seen = [found[name] for found in named if name in found and found[name].dim() == tensor.dim()]
        for axis in range(tensor.dim()):
            sizes = tuple(other.shape[axis] for other in seen)
            if axis == 0 and id(tensor) in samples:
                axes.setdefault(name, {})[0] = "batch"
            elif len(set(sizes)) > 1:
                axes.setdefault(name, {})[axis] = names.setdefault(sizes, f"size{len(names)}")
    return Example(calls[0], outputs, rows, axes or None)


def _named(call: Call, signature: inspect.Signature) -> dict[str, Tensor]:
    """The tensors of a call, by their input names in the file."""
    args, kwargs = call[0], in_order(call[1], signature)
    return dict(zip(input_names(args, kwargs, signature, None), flat_inputs(args, kwargs), strict=True))


@dataclass(frozen=True)
class Bench:
    """`calibration`: the batches that candidates are calibrated on. `float_file`: the float model for the runtime."""

    model: nn.Module
    goal: LadderGoal
    calibration: Sequence[Any]
    example: Example
    judge: Judge
    stopwatch: Stopwatch | None
    float_file: Path
    float_cost: Cost

    @property
    def runtime(self) -> str:
        return PROFILES[self.goal.target].executes or "onnxruntime"

    @property
    def ending(self) -> str:
        return PROFILES[self.goal.target].ending

    def runner(self, file: Path, qmodel: QuantModel) -> Model:
        """The model that is judged: the file in its runtime; the simulation if the target does not run here."""
        if self.stopwatch is None:
            return qmodel
        return RuntimeModel(file, self.runtime, self.model, self.example.outputs)

    def cost(self, file: Path, net: nn.Module, name: str) -> Cost:
        """The cost of a file. `net`: the float model that it was quantized from; `name`: unique to the file."""
        size, macs = num_bytes(file), _macs(net, self.example)
        timed = self.times({name: file}).get(name)
        return Cost(
            size,
            size / self.float_cost.num_bytes,
            macs,
            macs / self.float_cost.macs if self.float_cost.macs else 1.0,
            None if timed is None else timed.ms,
            None if timed is None else timed.ratio,
        )

    def times(self, files: Mapping[str, Path], seconds: float = _TIMING_S) -> dict[str, Timed]:
        """The time of each file over the float file's, in turns; empty if the target does not run here."""
        if self.stopwatch is None:
            return {}
        read = {name: path.read_bytes() for name, path in {"float": self.float_file, **files}.items()}
        return self.stopwatch.ratios(read, seconds)


def stopwatch_for(goal: LadderGoal, example: Example, model: nn.Module) -> Stopwatch | None:
    """A timer of one sample (of the whole batch, if the batch size is fixed); None if the target is not timed here."""
    runtime = PROFILES[goal.target].timed_in
    if runtime is None:
        return None
    call = example.with_samples(1) if example.axes or example.num_samples else example.call
    if any(tensor.dtype == torch.bfloat16 for tensor in tensors_of(call)):
        raise ConfigError("inputs of type bfloat16, which no runtime here reads; give model.float() and its data")
    arrays = [tensor.detach().cpu().numpy() for tensor in _named(call, inspect.signature(model.forward)).values()]
    return Stopwatch(runtime, [arrays])


def float_cost(file: Path, model: nn.Module, example: Example, stopwatch: Stopwatch | None) -> Cost:
    """The cost of the float file, to which all shares refer."""
    milliseconds = None
    if stopwatch is not None:
        milliseconds = stopwatch.ratios({"float": file.read_bytes()}, 1.0)["float"].ms
    latency = None if stopwatch is None else 1.0
    return Cost(num_bytes(file), 1.0, _macs(model, example), 1.0, milliseconds, latency)


def write_float(model: nn.Module, example: Example, target: Path) -> Axes | None:
    """Write the float model; returns the open sizes, None if the model cannot be exported with any."""
    signature = inspect.signature(model.forward)
    for axes in dict.fromkeys([bool(example.axes), False]):
        args, kwargs = example.with_samples(2) if axes else example.call
        options = OnnxOptions(dynamic_axes=example.axes if axes else None, opset_version=PROFILES["virtual"].opset)
        try:
            made: Any = to_onnx(model, args, in_order(kwargs, signature), options, signature=signature)
        except Exception:  # a model that runs with one number of samples only may raise anything
            if axes:
                continue
            raise
        tidy(made, {})
        with staged(target) as path:
            write(made, path)
        return example.axes if axes else None
    raise AssertionError("the loop returns or raises")


def runtime_float(model: nn.Module, example: Example, target: str, onnx_file: Path) -> Path:
    """The float file that times and sizes are compared with: the ONNX file, or next to it a program of the runtime."""
    if target not in TARGETS:
        return onnx_file
    file = onnx_file.with_suffix(TARGETS[target].ending)
    args, kwargs = as_call(example.batch, model)
    signature = inspect.signature(model.forward)
    with staged_result(file) as path:
        TARGETS[target].write(*flat_program(model, args, in_order(kwargs, signature), signature, TARGETS[target]), path)
    return file


def _macs(net: nn.Module, example: Example) -> int:
    """Multiplications for one sample."""
    args, kwargs = example.call
    return round(model_size(net, kwargs or args).macs)
