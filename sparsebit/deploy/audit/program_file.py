"""`audit_program`: which layers of a compiled program run in integers, and its time against a float program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsebit.deploy.comparing.verdict import verdict
from sparsebit.deploy.onnx_graph.packages import numpy
from sparsebit.deploy.sessions.cpu import cpu_name, is_arm
from sparsebit.deploy.sessions.program_facts import ProgramSession
from sparsebit.deploy.sessions.runtime_sessions import open_session, runtime_version
from sparsebit.deploy.sessions.timing import interleaved
from sparsebit.errors import DeploymentError
from sparsebit.records.audit import Audit


def audit_program(
    path: Path, runtime: str, against: Any, feeds: Mapping[str, Any] | None, how: tuple[int, int | None, float]
) -> Audit:
    """The layers as the compiler assigned them, which the file holds, and the times if there is a float program.

    `how`: number of threads, rounds of timing (None: as many as fit), seconds of timing.
    """
    num_threads, repeats, budget_s = how
    session: Any = open_session(path, runtime, num_threads=num_threads)
    assert isinstance(session, ProgramSession)
    facts = session.facts
    found = Audit(
        file=str(path),
        runtime=runtime,
        runtime_version=runtime_version(runtime),
        cpu=cpu_name(),
        num_threads=num_threads,
        layers=facts.layers,
        leftovers=facts.leftovers,
        num_bytes=path.stat().st_size,
        warnings=tuple(_warnings(session)),
    )
    if against is not None and repeats != 0:
        other = open_session(Path(against), runtime, num_threads=num_threads)
        if other.input_types != session.input_types:
            raise DeploymentError(f"{against} takes {other.input_types}, {path} takes {session.input_types}")
        arrays, words = made_up(session, feeds or {})
        runs = {"float": lambda: other.run(arrays), "quantized": lambda: session.run(arrays)}
        latency = interleaved(runs, budget_s=budget_s, num_rounds=repeats)
        size = Path(against).stat().st_size
        found = replace(found, feeds=words, latency=latency, float_source=str(against), float_bytes=size)
    return replace(found, verdict=verdict(found))


def made_up(session: ProgramSession, feeds: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The given arrays, and for other inputs random ones (zeros where they are whole numbers); and what they are."""
    random = numpy.random.default_rng(0)
    arrays, words = {}, {}
    for port in session.facts.inputs:
        shape = tuple(1 if size is None else size for size in port.shape)
        is_float = port.dtype.startswith("float")
        values = feeds.get(port.name, random.standard_normal(shape) if is_float else numpy.zeros(shape))
        arrays[port.name] = numpy.ascontiguousarray(values, dtype=port.dtype)
        words[port.name] = "given" if port.name in feeds else "random normal" if is_float else "zeros"
    return arrays, words


def _warnings(session: ProgramSession) -> list[str]:
    facts, found = session.facts, []
    if not facts.layers:
        found.append("the file does not say how its layers run: sparsebit writes that into the programs that it makes")
    if facts.num_outside:
        share = facts.num_inside / (facts.num_inside + facts.num_outside)
        causes = sorted({f"{layer.op}: {layer.cause}" for layer in facts.layers if "does not take" in layer.cause})
        listed = f" ({'; '.join(causes[:3])})" if causes else ""
        found.append(
            f"{share:.0%} of the operators are delegated, {facts.num_outside} run in portable kernels, which are slow"
            f"{listed}"
        )
    if is_arm():
        found.append("this is an ARM processor: how fast a program is differs from x86; audit where you deploy")
    return found
