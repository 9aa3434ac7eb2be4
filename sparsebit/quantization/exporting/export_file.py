"""`export`: writes a calibrated model as the file of its backend, which the ending of the name says too."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import torch

from sparsebit.deploy.comparing.parity import Comparison, Parity, Tolerance
from sparsebit.deploy.onnx_graph.io_names import DynamicAxes
from sparsebit.deploy.programs.flat_program import FlatProgram, flat_program
from sparsebit.deploy.programs.program_target import ProgramTarget
from sparsebit.deploy.programs.targets import TARGETS
from sparsebit.deploy.runtimes import PROFILES, owner_of
from sparsebit.deploy.sessions.runtime_sessions import open_session, require_runtime
from sparsebit.errors import DeploymentError
from sparsebit.execution.batches import Call
from sparsebit.folders import staged_result, unwritable
from sparsebit.graph.state.modes import evaluating
from sparsebit.numerics.full_float32 import full_float32
from sparsebit.quantization.calibrating.model_state import check_ready, require_whole, switched, switched_on
from sparsebit.quantization.exporting.export import export_call, export_onnx, warn_of_differences
from sparsebit.quantization.exporting.export_checks import NUM_SAMPLES, feeds_of, file_calls, simulated
from sparsebit.quantization.exporting.export_constants import quantizers_as_constants
from sparsebit.quantization.exporting.program_sites import program_differences
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.records.phases import EXPORT, phase


def export(
    qmodel: SimulatedModel,
    name: str | os.PathLike[str],
    dummy_data: Any,
    *,
    dynamic_axes: DynamicAxes | None = None,
    check: Any = None,
    tolerance: Tolerance | None = None,
) -> Parity | None:
    """Write the file of the model's BACKEND: `.onnx`, `.pte` (executorch).

    `dummy_data`, `dynamic_axes`, `check`, `tolerance`: as for `export_onnx`. An older file of that name stays until the
    new one is complete and has passed the comparison. Returns the comparison.

    >>> qmodel.export("model.pte", batches[0], check=batches)  # doctest: +SKIP
    """
    path = Path(name)
    target = checked_target(path, qmodel.config.BACKEND)
    if target is None:
        return export_onnx(qmodel, dummy_data, path, dynamic_axes=dynamic_axes, check=check, tolerance=tolerance)
    require_whole(qmodel, "export")
    check_ready(qmodel, "export")
    # An older folder of such a name may be replaced; the place of the folder must be there all the same.
    place = path.with_name(f".{path.name}") if target.is_folder and path.is_dir() else path
    if fault := unwritable(place, f"model{target.ending}"):
        raise DeploymentError(fault)
    target.require()
    if check is not None:
        require_to_run(target)
    parity = None
    with switched_on(qmodel):
        program, facts = build_program(qmodel, dummy_data, target, dynamic_axes)
        with staged_result(path) as made:
            with phase(EXPORT):
                target.write(program, facts, made)
            if check is not None:
                parity = check_program(qmodel, made, check, tolerance=tolerance, name=str(path))
    return parity


def checked_target(path: Path, backend: str) -> ProgramTarget | None:
    """The target that writes this file for this backend, None for an ONNX file; an error if the two do not agree."""
    wanted, ending = PROFILES[backend].ending, path.suffix.lower()
    if path.name.lower().endswith(wanted):
        return TARGETS.get(backend)
    owner = owner_of(path)
    if owner is not None:
        raise DeploymentError(
            f"{path}: {ending} is the file of BACKEND: {owner}, and the model is quantized for {backend}, whose files "
            f"end in {wanted}; quantize with BACKEND: {owner}, or write {path.with_suffix(wanted)}"
        )
    raise DeploymentError(f"{path}: the file of BACKEND: {backend} ends in {wanted}; write {path.with_suffix(wanted)}")


def _require_float32(qmodel: SimulatedModel) -> None:
    """Raise for a model of another float type: the integer kernels of these runtimes take and make float32."""
    kinds = {p.dtype for p in qmodel.parameters() if p.is_floating_point()} - {torch.float32}
    if kinds:
        kind = str(sorted(map(str, kinds))[0]).removeprefix("torch.")
        raise DeploymentError(
            f"export: the model computes in {kind}, for which {qmodel.config.BACKEND} has no integer kernels; call "
            "qmodel.float() first, and give float32 inputs"
        )


def require_to_run(target: ProgramTarget) -> None:
    """Raise, before any work, if files of the target cannot be run on this machine."""
    if PROFILES[target.name].executes is None:
        raise DeploymentError(
            f"check: no runtime here runs files for {target.name}; leave it out, and compare the file where it runs"
        )
    require_runtime(target.name)


@phase(EXPORT)
def build_program(
    qmodel: SimulatedModel, dummy_data: Any, target: ProgramTarget, axes: DynamicAxes | None = None
) -> FlatProgram:
    """The program that a target's file is made of."""
    args, kwargs = export_call(qmodel, dummy_data)
    _require_float32(qmodel)
    warn_of_differences(qmodel, (args, kwargs), "export")
    with evaluating(qmodel), quantizers_as_constants(qmodel):
        return flat_program(qmodel, args, kwargs, inspect.signature(qmodel.original.forward), target, axes)


@phase(EXPORT)
def write_float_program(qmodel: SimulatedModel, path: Path, dummy_data: Any, axes: DynamicAxes | None = None) -> None:
    """Write the model without its quantization as a file of its BACKEND, to compare times with."""
    target = TARGETS[qmodel.config.BACKEND]
    args, kwargs = export_call(qmodel, dummy_data)
    with switched(qmodel.quantizers(), to=False), evaluating(qmodel):
        signature = inspect.signature(qmodel.original.forward)
        program, facts = flat_program(qmodel, args, kwargs, signature, target, axes)
    target.write(program, facts, path)


@phase("check")
@full_float32()
def check_program(
    qmodel: SimulatedModel,
    file: Path,
    data: Any,
    *,
    tolerance: Tolerance | None = None,
    num_samples: int = NUM_SAMPLES,
    name: str | None = None,
) -> Parity:
    """Run a program in its runtime on `data`, and compare with the simulation; a larger difference is an error."""
    name = name or str(file)
    runtime = PROFILES[qmodel.config.BACKEND].executes
    assert runtime is not None, "require_to_run asks first"
    try:
        session = open_session(file, runtime)
    except DeploymentError as error:  # show the name that the user gave, not the temporary path
        raise DeploymentError(str(error).replace(str(file), name)) from error
    comparison = Comparison(session.outputs)
    batches = list(file_calls(qmodel.original, qmodel, qmodel.device, session, data, num_samples))
    for call in batches:
        expected, reference = simulated(qmodel, call), simulated(qmodel, call, quantized=False)
        comparison.add(expected, session.run(feeds_of(session, call)), reference)
    parity = comparison.result(name, runtime, "the simulation")
    if fault := parity.fault(tolerance or Tolerance()):
        raise DeploymentError(
            f"{name} does not compute what was simulated ({runtime}): {fault}; {_where(qmodel, batches[0])}"
        )
    return parity


def _where(qmodel: SimulatedModel, call: Call) -> str:
    """The first site that differs, in a file that is written for the purpose."""
    try:
        differences = program_differences(qmodel, call)
    except DeploymentError as error:
        return f"the first site that differs was not found: {error}"
    first = next((one for one in differences if one.largest), None)
    if first is not None:
        return f"the first site that differs is {first}"
    return "the integers of all sites agree in a file written now, so it is another model's, or an op after them"
