"""`Stopwatch`: times files in their runtime on this machine; searches use it, and tests replace it."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sparsebit.deploy.audit.region_times import RegionTimes, region_times
from sparsebit.deploy.comparing.parity import decibels
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.deploy.sessions.session import Session
from sparsebit.deploy.sessions.timing import interleaved


@dataclass(frozen=True)
class Timed:
    """`ratio`: the time over that of the first file. `noise`: half the distance of the quartiles over the median.

    `ms`: the median time of one call.
    """

    ratio: float
    noise: float
    ms: float = 0.0


class Stopwatch:
    """Opens files in the runtime and runs them in turns on real samples (arrays in the order of the file's inputs).

    With one thread, CPU time is measured, which other processes hardly change; with several, wall time.
    """

    def __init__(self, runtime: str, samples: Sequence[Sequence[Any]], num_threads: int = 1) -> None:
        self.runtime, self.samples, self.num_threads = runtime, samples, num_threads
        self._open: dict[str, Session] = {}

    def ratios(self, files: Mapping[str, bytes], budget_s: float) -> dict[str, Timed]:
        """The time of every file over that of the first. Sessions stay open by name, so a name must keep its file."""
        for name in [name for name in self._open if name not in files]:
            del self._open[name]
        # Sessions of earlier files hold memory and threads, which would disturb the timing.
        gc.collect()
        sessions = {name: self._session(name, file) for name, file in files.items()}
        runs = {name: partial(session.run, _feeds(session, self.samples[0])) for name, session in sessions.items()}
        timed, clock = {}, "cpu" if self.num_threads == 1 else "wall"
        for name, latency in interleaved(runs, budget_s=budget_s).items():
            ratio, middle, (low, high) = (getattr(latency, f"{clock}_{of}") for of in ("ratio", "ms", "quartiles_ms"))
            timed[name] = Timed(ratio, (high - low) / 2 / middle if middle else 0.0, middle)
        return timed

    def regions(self, files: Mapping[str, bytes]) -> dict[str, RegionTimes]:
        """The time of every fused region of every file."""
        first = next(iter(files.values()))
        feeds = _feeds(open_session(first, self.runtime, num_threads=self.num_threads), self.samples[0])
        return region_times(files, runtime=self.runtime, num_threads=self.num_threads, feeds=feeds)

    def sqnr_db(self, name: str, file: bytes, reference: bytes) -> float:
        """Signal against quantization noise, over all float outputs of all samples."""
        session, other = self._session(name, file), self._session("float", reference)
        signal = noise = 0.0
        for sample in self.samples:
            pairs = zip(other.run(_feeds(other, sample)), session.run(_feeds(session, sample)), strict=True)
            for expected, found in pairs:
                if expected.dtype.kind == "f":
                    wanted = expected.astype("float64")
                    signal += float((wanted**2).sum())
                    noise += float(((wanted - found) ** 2).sum())
        return decibels(signal, noise)

    def _session(self, name: str, file: bytes) -> Session:
        if name not in self._open:
            self._open[name] = open_session(file, self.runtime, num_threads=self.num_threads)
        return self._open[name]


def _feeds(session: Session, sample: Sequence[Any]) -> dict[str, Any]:
    pairs = zip(session.inputs, sample, strict=True)
    return {name: array.astype(session.input_types[name], copy=False) for name, array in pairs}
