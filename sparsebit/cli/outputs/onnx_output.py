"""`--output model.onnx`: writes an ONNX file, compares it with the simulation before keeping it, and times it.

`checked_file` raises before the long work for a name or a package that would fail later; `export` does the work;
`Exported` holds the results and words them for the table, for `--json` and for a record. A file that differs from its
simulation is not kept, unless `--no-check` is given.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sparsebit.cli.inputs.calibrated_model import Subject
from sparsebit.cli.option_groups import FileOptions
from sparsebit.cli.options import Names
from sparsebit.cli.outputs.output import kilobytes
from sparsebit.cli.outputs.program_output import checked_program, write_program
from sparsebit.deploy.audit.audit_file import audit
from sparsebit.deploy.audit.tensorrt_rules import Violation, tensorrt_violations
from sparsebit.deploy.comparing.file_model import FileModel
from sparsebit.deploy.comparing.parity import Parity
from sparsebit.deploy.comparing.verdict import EVEN, verdict
from sparsebit.deploy.exporting.to_onnx import flat_inputs, in_order, input_names
from sparsebit.deploy.onnx_graph.model_file import checked_path, data_files, file_facts, need_own
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.errors import DeploymentError, MissingExtraError
from sparsebit.execution.batches import Call
from sparsebit.quantization.exporting.export_file import checked_target
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.records import FileFacts, ParityCheck
from sparsebit.records.audit import Audit

FILE_ENDINGS = tuple(dict.fromkeys(profile.ending for profile in PROFILES.values()))
PACKAGES = ("onnx", "onnxscript", "onnx_ir")
_BATCH = "batch"
_LARGEST_TIMED = 1 << 30
_TIMED_S = 1.5


@dataclass(frozen=True)
class Exported:
    """The file, and the results of its checks; None or empty: not checked.

    `advice`: rules of TensorRT that the file breaks and that only cost speed. A file that breaks others is not written.
    `untimed`: why its time was not compared with float.
    """

    file: Path
    num_bytes: int
    float_bytes: int
    parity: Parity | None = None
    audit: Audit | None = None
    untimed: str = ""
    advice: tuple[Violation, ...] | None = None

    @property
    def time(self) -> str:
        """The file's time against the float model's, as text."""
        ratio = self.audit and self.audit.ratio
        if ratio is None:
            return f"not measured: {self.untimed or 'it could not be compared with float'}"
        return f"{ratio:.2f} of float, measured on this machine (CPU time, 1 thread)"

    @property
    def runs(self) -> str:
        """Which layers run in integers, as text."""
        return "" if self.audit is None else verdict(replace(self.audit, latency={}))

    def warnings(self, placement: str = "default") -> tuple[str, ...]:
        """The warnings of the audit, and one if the file is slower than float."""
        found, ratio = ((), None) if self.audit is None else (self.audit.warnings, self.audit.ratio)
        if ratio is None or ratio <= 1 + EVEN:
            return found
        remedy = "--placement measured finds out which layers to keep in float"
        if placement != "default":
            remedy = "the placement was measured with other shapes, on another machine, or while this one was busy"
        return (*found, f"the file is slower than float here ({ratio:.2f} of its time): {remedy}")

    @property
    def ratio(self) -> float | None:
        """The file's size divided by that of the weights in float."""
        return self.num_bytes / self.float_bytes if self.float_bytes else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": str(self.file),
            "bytes": self.num_bytes,
            "ratio": self.ratio,
            "time": {"ratio": self.audit and self.audit.ratio, "words": self.time},
            "parity": self.parity and self.parity.to_dict(),
            "audit": self.audit and {"verdict": self.runs, "counts": self.audit.counts()},
            "tensorrt_advice": None if self.advice is None else [one.to_dict() for one in self.advice],
        }

    def file_facts(self) -> FileFacts:
        """The facts of the file for a record."""
        advice = None if self.advice is None else tuple(map(str, self.advice))
        return file_facts(self.file, float_bytes=self.float_bytes, advice=advice)

    def results(self, data: str | None) -> list[ParityCheck | Audit]:
        """The results for a record. `data`: describes the data that the file was run on."""
        found = [] if self.parity is None else [ParityCheck(self.parity, data=data)]
        return [*found, *([] if self.audit is None else [self.audit])]

    def facts(self) -> dict[str, str]:
        """One or two lines for each fact."""
        share = "" if self.ratio is None else f", {self.ratio:.2f} of the float weights"
        follows = "" if self.advice is None else "follows TensorRT's rules (TensorRT itself does not run here)"
        return {
            "file": f"{self.file}, {kilobytes(self.num_bytes)}{share}",
            "parity": str(self.parity or "not checked"),
            "time": self.time,
            "runs": self.runs,
            "tensorrt": "\n".join(map(str, self.advice or ())) or follows,
        }


def checked_file(path: Path, backend: str, options: FileOptions) -> Path:
    """The path, if the file can be written and the required packages are installed; checked before the work."""
    program = checked_target(path, backend)
    if program is not None:
        return checked_program(path.expanduser(), program, options)
    target = checked_path(path.expanduser())
    runtime = PROFILES[backend].executes or "onnxruntime"
    require(*PACKAGES, *([] if options.no_check else [runtime]))
    if not options.overwrite:
        extra = [target.with_name(f"{target.stem}_extra.onnx")] if options.extra_info else []
        for file in (target, *extra):
            need_own(file, "give another name, or --overwrite")
    return target


def check_names(subject: Subject, options: FileOptions) -> None:
    """Raise, before the work, for names that do not fit the model's inputs."""
    _named_inputs(subject, options.input_names)


def require(*packages: str, extra: str | None = None) -> None:
    """A MissingExtraError for the first package that is not installed; `extra`: the extra that installs all of them."""
    for package in packages:
        try:
            missing = importlib.util.find_spec(package) is None
        except ValueError:  # sys.modules holds None, as tests put it there
            missing = True
        if missing:
            named = extra or {"openvino": "openvino", "onnxruntime_qnn": "qnn"}.get(package, "onnx")
            raise MissingExtraError(package.replace("_", "-"), named, "writing and checking an ONNX file")


def export(subject: Subject, qmodel: QuantModel, target: Path, options: FileOptions, float_bytes: int) -> Exported:
    """Write the file; by default compare it with the simulation and check how its runtime executes it."""
    if target.suffix.lower() != ".onnx":
        batch, axes = example_of(subject, options)
        made = write_program(subject.data, (batch[1] or batch[0], axes), qmodel, target, options)
        return Exported(target, target.stat().st_size, float_bytes, *made)
    (args, kwargs), axes = example_of(subject, options)
    parity = qmodel.export_onnx(
        kwargs or args,
        target,
        input_names=options.input_names,
        output_names=options.output_names,
        dynamic_axes=axes,
        opset_version=options.opset,
        extra_info=options.extra_info,
        check=None if options.no_check else subject.data,
        tolerance=options.limits.tolerance(),
    )
    num_bytes = sum(path.stat().st_size for path in (target, *data_files(target)))
    profile = PROFILES[qmodel.config.BACKEND]
    if options.no_check:
        return Exported(target, num_bytes, float_bytes, untimed="--no-check")
    found, untimed = None, f"no runtime here runs files for {profile.name}"
    if profile.simulated:
        untimed = f"{profile.name} is simulated here, and a simulator's time says nothing about the device"
    if profile.executes is not None:
        found, reason = _audited(subject, target, profile.executes, options, num_bytes)
        untimed = reason if profile.timed_in is not None else untimed
    advice = tuple(tensorrt_violations(target)) if profile.name == "tensorrt" else None
    return Exported(target, num_bytes, float_bytes, parity, found, untimed, advice)


def scored_file(file: Path, model: nn.Module) -> dict[str, tuple[Callable[..., Any], str]]:
    """The file as a callable with the signature of its model."""
    return {"file": (FileModel(file, signature=inspect.signature(model.forward)), "cpu")}


def _audited(subject: Subject, file: Path, runtime: str, options: FileOptions, num_bytes: int) -> tuple[Audit, str]:
    """How the runtime executes the file, and its time against float; if it was not timed, the reason."""
    if num_bytes > _LARGEST_TIMED:
        return audit(file, runtime=runtime, repeats=0), f"the file is larger than {kilobytes(_LARGEST_TIMED)}"
    call, _ = example_of(subject, options)
    feeds = {name: x.detach().cpu().numpy() for name, x in _named_inputs(subject, options.input_names, call).items()}
    try:
        return audit(file, runtime=runtime, feeds=feeds, budget_s=_TIMED_S), ""
    except DeploymentError as error:
        return audit(file, runtime=runtime, repeats=0), str(error)


def example_of(subject: Subject, options: FileOptions) -> tuple[Call, dict[str, dict[int, str]] | None]:
    """The exported call, and its dynamic axes."""
    batch, is_open = subject.first_batch, options.dynamic_batch
    # torch.export treats a size of 1 as fixed, so two samples are used if the number is open (if need be, equal ones).
    call: Call = batch.samples.of(batch.call, [row % batch.num_samples for row in range(2 if is_open else 1)])
    # Axis 0 is open in every input whose rows are samples; inputs are matched by identity, as two may be equal.
    samples = {id(tensor) for tensor in batch.samples.tensors(batch.call)}
    named = _named_inputs(subject, options.input_names)
    axes = {name: {0: _BATCH} for name, tensor in named.items() if id(tensor) in samples}
    return call, axes if is_open else None


def _named_inputs(subject: Subject, given: Names | None, call: Call | None = None) -> dict[str, Tensor]:
    """The inputs by the file's names, in the order of forward's parameters, whatever the order of the data."""
    args, keywords = call or subject.first_batch.call
    signature = inspect.signature(subject.model.forward)
    kwargs = in_order(keywords, signature)
    return dict(zip(input_names(args, kwargs, signature, given), flat_inputs(args, kwargs), strict=True))
