"""`record`: turns a quantized model and the results of verbs into one `RunRecord`.

A `RunRecord` is plain data that becomes JSON; reports and comparisons read it. Each result (an error profile, a parity
check, an audit) has one section. The model is identified by two SHA-256 digests: of its architecture (names, shapes and
dtypes of its tensors), and of its numbers (weights, scales and config). `file_record` and `float_record` are the same
for an ONNX file without a model, and for a model that was exported unquantized.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn

from sparsebit.deploy.onnx_graph.model_file import file_facts
from sparsebit.deploy.sessions.environment import environment
from sparsebit.errors import RecordError
from sparsebit.execution.distributed import gather_shards
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.quantization.inspecting.layer_graph import layer_graph
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.records import (
    Audit,
    ErrorProfile,
    FileFacts,
    Measured,
    ModelFacts,
    OutputError,
    Parity,
    ParityCheck,
    RunRecord,
)

Result: TypeAlias = ErrorProfile | Parity | ParityCheck | Audit | OutputError


def record(
    qmodel: SimulatedModel,
    *results: Result | None,
    name: str | None = None,
    file: str | os.PathLike[str] | None = None,
    run: Measured | None = None,
    warnings: tuple[str, ...] = (),
) -> RunRecord:
    """A `RunRecord` of a quantized model, with the given results; None among them is ignored.

    `file`: the ONNX file that was exported from it; default: the one that the results name. `name`: the model's name;
    default: its class. `run`: the result of `measured`, for timings, versions and the machine.

    >>> from sparsebit.records import measured
    >>> import sparsebit, torch
    >>> with measured("study") as run:
    ...     qmodel = sparsebit.quantize(torch.nn.Linear(4, 2), [torch.randn(8, 4)], "onnxruntime")
    ...     errors = qmodel.profile(torch.randn(8, 4))
    >>> made = record(qmodel, errors, run=run)
    >>> made.sections
    ('model', 'config', 'plan', 'graph', 'coverage', 'calibration', 'errors')
    >>> list(made.runs[0].phases)
    ['capture', 'calibration', 'profile']
    """
    found = [result for result in results if result is not None]
    path, coverage = _one_file(found, file), qmodel.coverage
    float_bytes = sum(parameter.float_bytes for parameter in coverage.parameters)
    made = RunRecord(
        model=model_facts(qmodel, name),
        config=qmodel.config.to_dict(),
        plan={key: value for key, value in qmodel.plan.to_dict().items() if key != "config"},
        graph=layer_graph(qmodel),
        coverage=coverage,
        calibration=None if run is None else run.calibration,
        file=None if path is None else file_facts(path, float_bytes=float_bytes),
    )
    return with_run(with_results(made, found), run, warnings)


def file_record(
    file: str | os.PathLike[str] | FileFacts, *results: Result, run: Measured, warnings: tuple[str, ...] = ()
) -> RunRecord:
    """The record of an ONNX file whose model is unknown."""
    facts = file if isinstance(file, FileFacts) else file_facts(Path(file))
    return with_run(with_results(RunRecord(file=facts), list(results)), run, warnings)


def float_record(
    model: nn.Module, name: str, facts: FileFacts, *results: Result, run: Measured, warnings: tuple[str, ...] = ()
) -> RunRecord:
    """The record of a float model that was exported unquantized."""
    made = RunRecord(model=float_facts(model, name), file=facts)
    return with_run(with_results(made, list(results)), run, warnings)


def with_results(made: RunRecord, results: list[Result]) -> RunRecord:
    """The record with each result in its section."""
    for result in results:
        match result:
            case ErrorProfile():
                made = made.replace(errors=(*made.errors, result))
            case Parity() | ParityCheck():
                check = ParityCheck(result) if isinstance(result, Parity) else result
                made = made.replace(parity=(*made.parity, check))
            case Audit():
                made = made.replace(audits=(*made.audits, result))
            case OutputError():
                made = made.replace(output=result)
            case _:
                kind, verbs = type(result).__name__, "profile, export_onnx, check_onnx or audit"
                raise RecordError(f"a {kind} has no section in a record; give what {verbs} returned")
    return made


def with_run(made: RunRecord, run: Measured | None, warnings: tuple[str, ...]) -> RunRecord:
    """The record with the run that filled it."""
    if run is None:
        return made
    return made.replace(runs=(*made.runs, run.run(environment(), made.sections, warnings)))


def model_facts(qmodel: SimulatedModel, name: str | None = None) -> ModelFacts:
    """The identity of a quantized model: digests of its architecture, and of its weights, scales and config."""
    model = qmodel.original
    config = qmodel.config.to_dict(defaults=True)
    config.pop("DEVICE")  # the device is not part of the model's identity
    sites = {quantizer.name: quantizer.describe() for quantizer in qmodel.quantizers() if not quantizer.fake_fused}
    # The extra state of a quantizer holds its switches; a model is the same with quantization on or off.
    switches = {f"{path}._extra_state" for path, module in qmodel.named_modules() if isinstance(module, Quantizer)}
    tensors = {key: value for key, value in gather_shards(qmodel.state_dict()).items() if key not in switches}
    return _facts(model, name, _checksum(tensors, config, sites))


def float_facts(model: nn.Module, name: str | None = None) -> ModelFacts:
    """The identity of a float model."""
    return _facts(model, name, _checksum(gather_shards(model.state_dict()), "float"))


def architecture_facts(model: nn.Module, name: str | None = None) -> ModelFacts:
    """The facts of a model before it is quantized: enough to distinguish architectures."""
    return _facts(model, name, "")


def _facts(model: nn.Module, name: str | None, numbers: str) -> ModelFacts:
    kind = type(model).__name__
    tensors = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
    forms = [kind, *(f"{key} {tuple(tensor.shape)} {tensor.dtype}" for key, tensor in sorted(tensors.items()))]
    architecture = hashlib.sha256("\n".join(forms).encode()).hexdigest()
    return ModelFacts(name or kind, kind, sum(p.numel() for p in model.parameters()), architecture, numbers)


def _checksum(tensors: Mapping[str, Any], *values: object) -> str:
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode())
    for key, value in sorted((key, value) for key, value in tensors.items() if isinstance(value, Tensor)):
        digest.update(f"\n{key} {tuple(value.shape)} {value.dtype} ".encode())
        plain = value.detach().cpu().contiguous().resolve_conj().resolve_neg()
        if plain.nbytes:  # read through ctypes, because numpy is an optional package
            digest.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
    return digest.hexdigest()


def _one_file(results: list[Result], given: str | os.PathLike[str] | None) -> Path | None:
    """The file that all results are about."""
    named = [result.parity.file for result in results if isinstance(result, ParityCheck)]
    named += [result.file for result in results if isinstance(result, (Parity, Audit))]
    paths = {os.path.realpath(path): Path(path) for path in (*named, *([] if given is None else [given]))}
    if len(paths) > 1:
        names = ", ".join(map(str, paths.values()))
        raise RecordError(f"results of different files ({names}) do not belong into one record; make one for each")
    return next(iter(paths.values()), None)
