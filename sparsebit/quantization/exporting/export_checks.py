"""`check_parity`: runs an exported file in its runtime on real inputs, and compares it with the simulation.

Three levels. The stored numbers must equal the simulation's (`stored_difference`). The outputs must agree within the
tolerance. Where ONNX Runtime executes integers, the codes of every site must agree bit by bit as far as all kernels
before are known to be exact (`_trace`), even if no output shows a difference on this data. An error names the first
site that differs.

Runtime options that change values are part of the judgement: on CPUs without VNNI, ONNX Runtime's 8-bit sums saturate
at 16 bits, so a file that fails there is tried again with the option that avoids it, and the user is warned.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsebit.deploy.audit.onnxruntime_graph import executed
from sparsebit.deploy.audit.tensorrt_rules import tensorrt_violations
from sparsebit.deploy.comparing.bit_exactness import stretches, unexplained
from sparsebit.deploy.comparing.check import runtime_of
from sparsebit.deploy.comparing.default_session import DefaultSession
from sparsebit.deploy.comparing.divergence import SiteDifference, first_divergence, kernel_fault, site_differences
from sparsebit.deploy.comparing.parity import Comparison, Parity, Tolerance
from sparsebit.deploy.exporting.to_onnx import flat_inputs, flat_outputs, in_order
from sparsebit.deploy.onnx_graph.qdq_graph import Graph, load_model
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.deploy.sessions.cpu import saturates
from sparsebit.deploy.sessions.runtime_sessions import EXACT, UNCLIPPED, open_session
from sparsebit.deploy.sessions.session import Session
from sparsebit.errors import DeploymentError
from sparsebit.execution.batches import Call, calls, num_samples_run
from sparsebit.graph.state.modes import evaluating
from sparsebit.graph.values.nested import map_nested
from sparsebit.numerics.full_float32 import full_float32
from sparsebit.quantization.calibrating.model_state import switched, switched_on
from sparsebit.quantization.exporting.stored_parameters import simulated_codes, stored_difference
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.records.phases import phase

log = logging.getLogger(__name__)

NUM_SAMPLES = 64
_NUM_SIMULATED = 8  # a simulator takes seconds for each
_NUM_SHOWN = 5
_STORES = "stores other numbers than the simulation has"


def check_onnx(
    qmodel: SimulatedModel, file: str | os.PathLike[str], data: Any, *, tolerance: Tolerance | None = None
) -> Parity:
    """Run an exported file in its runtime on `data` (batches as for calibration), and compare with the simulation."""
    with switched_on(qmodel):
        return check_parity(qmodel, Path(file), data, tolerance=tolerance)


@phase("check")
@full_float32()
def check_parity(
    qmodel: SimulatedModel,
    file: Path,
    data: Any,
    *,
    tolerance: Tolerance | None = None,
    num_samples: int | None = None,
    name: str | None = None,
) -> Parity:
    """Compare on the first `num_samples`; a larger difference is an error. `name`: the file's name in messages.

    By default they are 64, and 8 in a simulator.
    """
    profile = PROFILES[qmodel.config.BACKEND]
    num_samples = num_samples or (_NUM_SIMULATED if profile.simulated else NUM_SAMPLES)
    runtime = profile.executes or "onnxruntime"
    setting = _Setting(runtime, profile.executes is not None, EXACT[runtime])
    tolerance, name = tolerance or Tolerance(), name or str(file)
    try:
        session = open_session(file, runtime, optimize=setting.optimize, options=setting.options)
    except DeploymentError as error:  # show the name that the user gave, not the temporary path
        raise DeploymentError(str(error).replace(str(file), name)) from error
    batches = list(file_calls(qmodel.original, qmodel, qmodel.device, session, data, num_samples))
    stored = "" if tolerance.exact is False else stored_difference(qmodel, file)
    case = _Case(qmodel, file, name, batches, tolerance, stored)
    try:
        return _check(case, session, setting)
    except DeploymentError as error:
        if not setting.optimize or runtime != "onnxruntime" or not saturates():
            raise
        unclipped = setting._replace(options={**setting.options, **UNCLIPPED})
        try:
            session = open_session(file, options=unclipped.options)
            parity = _check(case, session, unclipped)
        except DeploymentError as other:
            log.debug("with %s: %s", _options_told(UNCLIPPED), other)
            is_wrong = _options_told(UNCLIPPED) in str(other)  # otherwise it does not run with these options
            raise (other if is_wrong else error) from None
        log.warning(
            "%s: this CPU has no VNNI, and ONNX Runtime's sums of 8-bit products clip at 16 bits on it (%s); with the "
            "session option session.x64quantprecision=1 it computes what was simulated, and so it does with VNNI",
            *(name, error),
        )
        return parity


class _Setting(NamedTuple):
    """How a file is run: in which runtime, with its fusions or node by node, with which options."""

    runtime: str
    optimize: bool
    options: Mapping[str, str]


class _Case(NamedTuple):
    """A file and its simulation. `name`: the file's name in messages; `stored`: differences of the stored numbers."""

    qmodel: SimulatedModel
    file: Path
    name: str
    batches: Sequence[Call]
    tolerance: Tolerance
    stored: str


def _check(case: _Case, session: Session, setting: _Setting) -> Parity:
    """Run the file on all batches, and judge it."""
    qmodel, tolerance = case.qmodel, case.tolerance
    shown = setting.runtime if setting.optimize else f"{setting.runtime}, node by node"
    weights_only = not any(q.is_enable for q in qmodel.quantizers() if q.target == "activation")
    named = {key: value for key, value in setting.options.items() if weights_only or key in UNCLIPPED}
    if named and setting.optimize:
        shown += f" ({_options_told(named)})"
    comparison = Comparison(session.outputs)
    default = None if setting.optimize else DefaultSession(case.file, case.name)
    different: _Batch | None = None
    for call in case.batches:
        feeds = feeds_of(session, call)
        expected, found = simulated(qmodel, call), session.run(feeds)
        reference = simulated(qmodel, call, quantized=False)
        comparison.add(expected, found, reference)
        if default is not None:
            default.add(feeds, expected, reference)
        if different is None and not all(map(_is_equal, expected, found)):
            different = _Batch(call, tuple(expected), tuple(found))
    parity = comparison.result(case.name, shown, "the simulation")
    if problem := _problem(case, session, setting, shown, parity.fault(tolerance), different):
        raise DeploymentError(f"{case.name} {problem}")
    if default is not None:
        # TensorRT's files are for another runtime: only a warning.
        remark = default.judge(tolerance, is_target=qmodel.config.BACKEND == "virtual")
        parity = replace(parity, runtime=f"{shown} ({remark})" if remark else shown)
    return parity


def _problem(case: _Case, session: Session, setting: _Setting, shown: str, fault: str, different: _Batch | None) -> str:
    """The fault of the file and its place, as a sentence; empty if there is none. `fault`: of its outputs."""
    if different is None and setting.optimize and setting.runtime == "onnxruntime":
        different = _Batch(case.batches[0])  # codes may differ even if the outputs do not, on this data
    if different is not None:
        exact = case.tolerance.exact
        differences, end = _trace(case.qmodel, case.file, session, different, setting)
        where = kernel_fault(differences) if setting.runtime == "onnxruntime" else None
        if where is not None:
            fault = fault or "one of its kernels is wrong"
        elif end and exact is not False:
            fault = fault or f"{end} must be equal bit by bit, because all its inputs are"
        if fault:
            where = where or first_divergence(differences, any_step=bool(exact or end))
            place = f"; the first site that differs is {where}" if where else _behind(differences)
            others = f"; it {_STORES}, {case.stored}" if case.stored else ""
            return f"does not compute what was simulated ({shown}): {fault}{place}{others}"
    if case.stored:
        hidden = "although no output shows it on this data"
        return f"does not compute what was simulated, {hidden} ({shown}): it {_STORES}, {case.stored}"
    return f"is not to be relied on ({shown}): {fault}" if fault else ""


@phase("check")
@full_float32()
def compare_model(
    model: nn.Module,
    file: Path,
    data: Any,
    *,
    tolerance: Tolerance | None = None,
    num_samples: int = NUM_SAMPLES,
    name: str | None = None,
) -> Parity:
    """The distance of a file, quantized or not, from a float model; more than `tolerance`, if given, is an error."""
    runtime, name = runtime_of(file), name or str(file)
    session = open_session(file, runtime)
    comparison = Comparison(session.outputs, judge_all=True)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    for call in file_calls(model, model, device, session, data, num_samples):
        with evaluating(model), torch.no_grad():
            expected = [_array(tensor) for tensor in flat_outputs(model(*call[0], **call[1]))]
        comparison.add(expected, session.run(feeds_of(session, call)))
    parity = comparison.result(name, runtime, "the float model")
    fault = "" if tolerance is None else parity.fault(tolerance)
    if fault:
        raise DeploymentError(f"{name} does not compute what the float model computes ({runtime}): {fault}")
    return parity


def _options_told(options: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items())


class _Batch(NamedTuple):
    """One batch, and, if its outputs differ, those of the simulation and of the file."""

    call: Call
    expected: tuple[Any, ...] = ()
    found: tuple[Any, ...] = ()


def _trace(
    qmodel: SimulatedModel, file: Path, session: Session, batch: _Batch, setting: _Setting
) -> tuple[list[SiteDifference], str]:
    """How far sites differ, and a site or an output that differs without a known reason; empty if there is none."""
    codes, kernels = simulated_codes(qmodel, batch.call)
    runtime, optimize, options = setting
    feeds = feeds_of(session, batch.call)
    differences = site_differences(file, runtime, feeds, codes, optimize=optimize, options=options)
    is_equal = {difference.site: not difference.largest for difference in differences}
    is_equal |= dict(zip(session.outputs, map(_is_rounded_alike, batch.expected, batch.found), strict=False))
    clips = saturates() and not UNCLIPPED.keys() <= options.keys()
    if all(is_equal.values()) or not optimize or runtime != "onnxruntime" or clips:
        return differences, ""
    graph = Graph(load_model(file))
    execution, _ = executed(file, graph, options=options)
    in_integers = {name for name, kernel in execution.kernels.items() if kernel.arithmetic == "integer"}
    found = unexplained(stretches(graph, {one.site for one in differences}, kernels, in_integers), is_equal)
    return differences, "" if found is None else found.end


def _is_equal(expected: Any, found: Any) -> bool:
    import numpy

    return numpy.array_equal(expected, found, equal_nan=expected.dtype.kind in "fc")


def _is_rounded_alike(expected: Any, found: Any) -> bool:
    """Equal, or floats that differ in their last bit: sums beyond 2^24 are rounded before or after the scale."""
    import numpy

    if _is_equal(expected, found) or expected.dtype.kind != "f" or not expected.size:
        return _is_equal(expected, found)
    largest = numpy.abs(expected[numpy.isfinite(expected)]).max(initial=0.0)
    return bool(numpy.allclose(found, expected, rtol=5e-7, atol=1e-7 * largest, equal_nan=True))


def _behind(differences: Sequence[SiteDifference]) -> str:
    if not differences:
        return "; it has no quantized activation to compare"
    agree = "agree but for single steps" if any(difference.largest for difference in differences) else "agree"
    return f"; all quantized activations {agree} up to the last one, {differences[-1].site}: the fault is after it"


def check_loads(qmodel: SimulatedModel, file: Path, name: str) -> None:
    """Raise if ONNX Runtime cannot open a file in half or double precision that is not for a certain runtime."""
    others = (torch.bfloat16, torch.float16, torch.float64)
    other = next((p.dtype for p in qmodel.parameters() if p.dtype in others), None)
    if other is None or qmodel.config.BACKEND != "virtual" or importlib.util.find_spec("onnxruntime") is None:
        return
    try:
        open_session(file, optimize=False)
    except DeploymentError as error:
        kind, text = "double" if other is torch.float64 else "half", str(error).replace(str(file), name)
        lacks = f"the model computes in {kind} precision, for which not every op has a kernel on a CPU"
        raise DeploymentError(f"{text}\n{lacks}; call qmodel.float() first") from error


def check_rules(file: Path, name: str) -> None:
    """Raise if TensorRT, which is not available here, would reject the file."""
    broken = [str(violation) for violation in tensorrt_violations(file) if violation.severity == "error"]
    if broken:
        more = f"\n  and {len(broken) - _NUM_SHOWN} more" if len(broken) > _NUM_SHOWN else ""
        raise DeploymentError(f"{name}: TensorRT would refuse it:\n  " + "\n  ".join(broken[:_NUM_SHOWN]) + more)


def file_calls(
    model: nn.Module, run: Any, device: torch.device | str, session: Session, data: Any, num_samples: int
) -> Iterator[Call]:
    """The data's samples in batches of the file's batch size. `run`: computes the outputs of `model` on `device`."""
    left = num_samples
    for args, keywords in calls(data, model, device):
        call = args, in_order(keywords, inspect.signature(model.forward))
        with evaluating(run):
            given = num_samples_run(call, run)
        size = session.batch_size
        step = min(size or given, given) if size else min(given, left, session.largest_batch or given)
        if size and given < size:
            if left < num_samples:  # the remainder of a loader
                return
            raise DeploymentError(f"the file takes batches of {size}, the data has {given}; export with dynamic_axes")
        for start in range(0, given - step + 1, max(step, 1)):
            if left <= 0:
                return
            yield _some_samples(call, given, range(start, start + step), session)
            left -= step


def _some_samples(call: Call, given: int, rows: range, session: Session) -> Call:
    """The call with some of its samples: rows are taken of inputs whose first size in the file fits, or is dynamic."""
    if len(rows) == given:
        return call
    shapes = zip(flat_inputs(*call), session.input_shapes.values(), strict=False)  # `_feeds` rejects other numbers
    cut = {id(tensor) for tensor, shape in shapes if shape and shape[0] in (len(rows), None) and len(tensor) == given}
    some: Call = map_nested(Tensor, lambda x: x[rows.start : rows.stop] if id(x) in cut else x, call)
    return some


@torch.no_grad()
def simulated(qmodel: SimulatedModel, call: Call, *, quantized: bool = True) -> list[Any]:
    """The outputs of the simulation, or of the float model in it, as numpy arrays."""
    args, kwargs = map_nested(Tensor, torch.clone, call)  # a model may write into its inputs
    with switched(qmodel.quantizers(), to=None if quantized else False), evaluating(qmodel):
        return [_array(tensor) for tensor in flat_outputs(qmodel(*args, **kwargs))]


def feeds_of(session: Session, call: Call) -> dict[str, Any]:
    tensors = flat_inputs(*call)
    if len(tensors) != len(session.inputs):
        raise DeploymentError(
            f"the file has {len(session.inputs)} inputs ({', '.join(session.inputs)}), the data {len(tensors)} tensors"
        )
    return {name: _array(tensor) for name, tensor in zip(session.inputs, tensors, strict=True)}


def _array(tensor: Tensor) -> Any:
    """The same numbers in numpy, which does not support bfloat16."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
