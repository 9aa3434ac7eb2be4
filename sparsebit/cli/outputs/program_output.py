"""`--output model.pte`: write a program for another runtime, compare it with the simulation, time it against float."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparsebit.cli.option_groups import FileOptions
from sparsebit.cli.options import refuse
from sparsebit.deploy.audit.audit_file import audit
from sparsebit.deploy.comparing.parity import Parity
from sparsebit.deploy.onnx_graph.io_names import DynamicAxes
from sparsebit.deploy.programs.program_target import ProgramTarget
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.errors import DeploymentError
from sparsebit.folders import unwritable
from sparsebit.quantization.exporting.export_file import require_to_run, write_float_program
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.records.audit import Audit

_OF_ONNX = ("--opset", "--input-names", "--output-names", "--extra-info")
_TIMED_S = 1.5


def checked_program(target: Path, program: ProgramTarget, options: FileOptions) -> Path:
    """The path, if the program can be written and its packages are installed; checked before the work."""
    others = [name for name in options.given() if name in _OF_ONNX]
    refuse({f"{', '.join(others)}: of ONNX files; {target.name} is a program": others}, "--output")
    if fault := unwritable(target, f"model{program.ending}"):
        raise DeploymentError(fault)
    program.require()
    if not options.no_check and PROFILES[program.name].executes is not None:
        require_to_run(program)
    if not options.overwrite and target.is_file() and target.stat().st_size and not _is_own(target, program.name):
        raise DeploymentError(f"{target} exists and was not written by sparsebit; give another name, or --overwrite")
    return target


def _is_own(file: Path, backend: str) -> bool:
    """Whether the facts that sparsebit stores in a program are in the file, as JSON or as JSON in JSON."""
    found, plain = file.read_bytes(), f'"backend": "{backend}"'
    return any(form.encode() in found for form in (plain, plain.replace('"', '\\"')))


def write_program(
    data: Iterable[Any],
    example: tuple[Any, DynamicAxes | None],
    qmodel: QuantModel,
    target: Path,
    options: FileOptions,
) -> tuple[Parity | None, Audit | None, str]:
    """Write it; returns the comparison, the audit with the time against the float program, and why it was not timed.

    `example`: the batch and the open sizes of the program.
    """
    batch, axes = example
    is_run = PROFILES[qmodel.config.BACKEND].executes is not None and not options.no_check
    limits: Any = {"check": data if is_run else None, "tolerance": options.limits.tolerance()}
    parity = qmodel.export(target, batch, dynamic_axes=axes, **limits)
    if not is_run:
        return parity, None, "--no-check" if options.no_check else "no runtime here runs it"
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / f"float{target.suffix}"
        try:
            write_float_program(qmodel, other, batch, axes)
        except DeploymentError as error:
            return parity, audit(target, repeats=0), f"the float program could not be made: {error}"
        return parity, audit(target, against=other, budget_s=_TIMED_S), ""
