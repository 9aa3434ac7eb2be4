"""An ONNX file as its runtime executes it, beside the same file node by node as it is written, or beside another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebit.cli.data import DataOptions, Inputs, load_data
from sparsebit.cli.feeding import Feeds, feeds, shapes
from sparsebit.cli.loading import LoadingError
from sparsebit.deploy.divergence import SiteDifference, first_divergence, kernel_fault, site_codes, site_differences
from sparsebit.deploy.float_twin import float_twin
from sparsebit.deploy.parity import Comparison, Parity, Tolerance
from sparsebit.deploy.qdq_graph import load_model
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.deploy.sessions import Session, open_session
from sparsebit.errors import DeploymentError

AS_WRITTEN = "the file as it is written"


@dataclass(frozen=True)
class FileParity:
    """What was found. `divergence`: the first site whose codes differ, only in a comparison with the file itself.

    `fault`: why the runtime does not compute what the file says; empty where it does, or where that was not asked.
    """

    parity: Parity
    data: str
    divergence: SiteDifference | None = None
    fault: str = ""


def runtime_of(file: Path) -> str:
    """The runtime that a file was exported for, by its own word; ONNX Runtime for files of other tools."""
    facts = {entry.key: entry.value for entry in load_model(file).metadata_props}
    profile = PROFILES.get(facts.get("sparsebit.backend", ""))
    return (profile.executes if profile is not None else None) or "onnxruntime"


def compare_as_written(file: Path, runtime: str, data: str, options: DataOptions) -> FileParity:
    """Does the runtime, which rewrites the graph, compute what the file says?"""
    session = open_session(file, runtime)
    written = open_session(file, "onnxruntime", optimize=False)
    twin = _twin(file)
    source = load_data(data, options, _inputs(session, file))
    comparison, first = Comparison(session.outputs), None
    for arrays in feeds(source, session, str(file), session.batch_size):
        first = first or arrays
        with _running(file, arrays):
            expected, found = written.run(arrays), session.run(arrays)
            reference = None if twin is None else twin.run(arrays)
        comparison.add(expected, found, reference)
    parity = comparison.result(str(file), runtime, AS_WRITTEN)
    if parity.is_exact or first is None:
        return FileParity(parity, source.description)
    codes = site_codes(file, "onnxruntime", first, optimize=False)
    differences = site_differences(file, runtime, first, codes)
    # OpenVINO hands out the codes of a graph that it fuses less; only its outputs are judged.
    broken = kernel_fault(differences) if runtime == "onnxruntime" else None
    fault = parity.fault(Tolerance()) or ("one of its kernels is wrong" if broken else "")
    return FileParity(parity, source.description, broken or first_divergence(differences), fault)


def compare_files(file: Path, against: Path, runtime: str, data: str, options: DataOptions) -> FileParity:
    """How far is a quantized file from the float one? Inputs and outputs are matched in order."""
    session, other = open_session(file, runtime), open_session(against, runtime)
    if len(session.inputs) != len(other.inputs):
        raise DeploymentError(
            f"{file} takes {', '.join(session.inputs)}; {against} takes {', '.join(other.inputs)}: not the same model"
        )
    sizes = {one.batch_size for one in (session, other)} - {None}
    if len(sizes) > 1:
        raise DeploymentError(
            f"{file} takes {session.batch_size} samples at once, {against} {other.batch_size}; export both alike"
        )
    source = load_data(data, options, _inputs(session, file))
    names = dict(zip(session.inputs, other.inputs, strict=True))
    comparison = Comparison(session.outputs, judge_all=True)
    for arrays in feeds(source, session, str(file), next(iter(sizes), None)):
        with _running(against, arrays):
            renamed = {names[name]: array.astype(other.input_types[names[name]]) for name, array in arrays.items()}
            expected = other.run(renamed)
        with _running(file, arrays):
            found = session.run(arrays)
        comparison.add(expected, found)
    return FileParity(comparison.result(str(file), runtime, str(against)), source.description)


def _inputs(session: Session, file: Path) -> Inputs:
    takes_bytes = "uint8" in session.input_types.values()
    return Inputs(session.inputs, f"input of {file}", in_order=True, takes_bytes=takes_bytes)


def _twin(file: Path) -> Session | None:
    """The file without its rounding, which shows how loud that is; None where there is no telling."""
    try:
        return open_session(_serialized(float_twin(file)), "onnxruntime")
    except DeploymentError:
        return None


def _serialized(model: Any) -> bytes:
    try:
        return bytes(model.SerializeToString())
    except Exception as error:  # beyond 2 GB; protobuf's exception classes differ by version
        raise DeploymentError(f"too large for memory: {error}") from error


@contextmanager
def _running(file: Path, arrays: Feeds) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the runtimes' own exception classes differ by version
        line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise LoadingError(f"{file} cannot run this data ({shapes(arrays)}): {line}") from error
