"""Compares a file as its runtime executes it with the same file as it is written, or with a float file.

A runtime rewrites the graph before it executes it. ONNX Runtime without its optimizations runs node by node as
written, which makes any QDQ file, of any tool, its own simulation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebit.deploy.comparing.divergence import (
    SiteDifference,
    first_divergence,
    kernel_fault,
    site_codes,
    site_differences,
)
from sparsebit.deploy.comparing.float_twin import float_twin
from sparsebit.deploy.comparing.parity import Comparison, Parity, Tolerance
from sparsebit.deploy.onnx_graph.qdq_graph import TWO_GIGABYTES, load_model
from sparsebit.deploy.runtimes import PROFILES, owner_of
from sparsebit.deploy.sessions.runtime_sessions import EXACT, open_session
from sparsebit.deploy.sessions.session import Session
from sparsebit.errors import DeploymentError
from sparsebit.records.phases import phase

AS_WRITTEN = "the file as it is written"

Feeds = Mapping[str, Any]
# Numpy arrays by the file's input names, batch by batch; or a function of the opened file and its batch size.
Batches = Iterable[Feeds] | Callable[[Session, int | None], Iterable[Feeds]]


@dataclass(frozen=True)
class FileParity:
    """`divergence`: the first site whose codes differ; only for a comparison of the file with itself.

    `fault`: how the results exceed the tolerance; empty if they do not, or if there is no tolerance.
    """

    parity: Parity
    divergence: SiteDifference | None = None
    fault: str = ""


def runtime_of(file: Path) -> str:
    """The runtime that a file was exported for, by its ending or metadata; ONNX Runtime for files of other tools."""
    if (owner := owner_of(file)) is not None:
        return owner
    facts = {entry.key: entry.value for entry in load_model(file).metadata_props}
    profile = PROFILES.get(facts.get("sparsebit.backend", ""))
    return (profile.executes if profile is not None else None) or "onnxruntime"


@phase("check")
def check_as_written(
    file: Path, batches: Batches, runtime: str | None = None, tolerance: Tolerance | None = None
) -> FileParity:
    """Whether the runtime computes the file as it is written, and if not, the first site that differs."""
    if owner_of(file) is not None:
        raise DeploymentError(
            f"{file}: a compiled program runs in one way only, so it has no second result to compare with; give the "
            "model that it was made from (--model with --quantized), or a float file (--against)"
        )
    tolerance = tolerance or Tolerance()
    runtime = runtime or runtime_of(file)
    session = open_session(file, runtime, options=EXACT.get(runtime))
    written, twin = open_session(file, "onnxruntime", optimize=False), _twin(file)
    comparison, first = Comparison(session.outputs), None
    for feeds in batches(session, session.batch_size) if callable(batches) else batches:
        first = first or feeds
        with _running(file, feeds):
            comparison.add(written.run(feeds), session.run(feeds), None if twin is None else twin.run(feeds))
    parity = comparison.result(str(file), runtime, AS_WRITTEN)
    if first is None or all(output.is_equal for output in parity.outputs):
        return FileParity(parity, fault=parity.fault(tolerance))
    codes = site_codes(file, "onnxruntime", first, optimize=False)
    differences = site_differences(file, runtime, first, codes)
    # With codes as outputs OpenVINO fuses less, so only its outputs are compared.
    broken = kernel_fault(differences) if runtime == "onnxruntime" else None
    fault = parity.fault(tolerance) or ("one of its kernels is wrong" if broken else "")
    return FileParity(parity, broken or first_divergence(differences), fault)


@phase("check")
def check_against(
    file: Path, against: Path, batches: Batches, runtime: str | None = None, tolerance: Tolerance | None = None
) -> FileParity:
    """The distance of a quantized file from the float one. Inputs and outputs are matched in order."""
    runtime = runtime or runtime_of(file)
    session, other = open_session(file, runtime), open_session(against, runtime)
    sizes = [session.batch_size, other.batch_size]
    if len(session.inputs) != len(other.inputs) or (None not in sizes and sizes[0] != sizes[1]):
        takes = [f"{one.batch_size or 'any number of'} samples of {', '.join(one.inputs)}" for one in (session, other)]
        raise DeploymentError(
            f"{file} takes {takes[0]}; {against} takes {takes[1]}: not the same model; export both alike"
        )
    names = dict(zip(session.inputs, other.inputs, strict=True))
    comparison = Comparison(session.outputs, judge_all=True)
    size = session.batch_size or other.batch_size  # the file with a fixed batch size determines how the data is split
    for feeds in batches(session, size) if callable(batches) else batches:
        with _running(against, feeds):
            renamed = {names[name]: array.astype(other.input_types[names[name]]) for name, array in feeds.items()}
            expected = other.run(renamed)
        with _running(file, feeds):
            comparison.add(expected, session.run(feeds))
    parity = comparison.result(str(file), runtime, str(against))
    return FileParity(parity, fault="" if tolerance is None else parity.fault(tolerance))


def _twin(file: Path) -> Session | None:
    """The file without its rounding, which shows the size of the rounding noise; None if it cannot be made."""
    try:
        twin = float_twin(file)
        return open_session(bytes(twin.SerializeToString()), "onnxruntime") if twin.ByteSize() < TWO_GIGABYTES else None
    except DeploymentError:
        return None


@contextlib.contextmanager
def _running(file: Path, feeds: Feeds) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the runtimes' own exception classes differ by version
        line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        shown = ", ".join(f"{name} {array.shape} {array.dtype}" for name, array in feeds.items())
        raise DeploymentError(f"{file} cannot run this data ({shown}): {line}") from error
