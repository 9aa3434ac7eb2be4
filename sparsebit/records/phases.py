"""Times the phases of a run: methods name their phases, and `measured` around the call measures them.

>>> with measured("nap") as run:
...     with phase("sleep"):
...         time.sleep(0.01)
>>> list(run.phases), run.phases["sleep"] <= run.seconds
(['sleep'], True)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

from sparsebit.records.run_record import CalibrationFacts, Environment, Run

EXPORT = "export"


class Measured:
    """The time that a run has taken so far, by phase; `measured` makes one for its block."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.phases: dict[str, float] = {}
        self.calibration: CalibrationFacts | None = None
        self._begin, self._end = time.perf_counter(), 0.0
        self._inner = 0.0  # seconds of the phases that ended inside the running one

    @property
    def seconds(self) -> float:
        return (self._end or time.perf_counter()) - self._begin

    @property
    def made(self) -> tuple[Literal["model", "file"], ...]:
        """Results of the block: a calibrated model, an exported file."""
        return (*(("model",) if self.calibration else ()), *(("file",) if EXPORT in self.phases else ()))

    def finish(self) -> None:
        self._end = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to the phase, without the phases inside the block."""
        outer, self._inner, begin = self._inner, 0.0, time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - begin
            self.phases[name] = self.phases.get(name, 0.0) + spent - self._inner
            self._inner = outer + spent

    def run(self, environment: Environment, sections: tuple[str, ...], warnings: tuple[str, ...] = ()) -> Run:
        """The entry in a record."""
        phases = dict(self.phases)
        return Run(self.verb, self.started, self.seconds, phases, sections, environment, self.made, warnings)


# The measurement of the enclosing block. Context-local: threads and tasks are separate.
_CURRENT: ContextVar[Measured | None] = ContextVar("sparsebit_measured", default=None)


@contextlib.contextmanager
def measured(verb: str) -> Iterator[Measured]:
    """A context manager that times the phases of what is called inside it."""
    run = Measured(verb)
    token = _CURRENT.set(run)
    try:
        yield run
    finally:
        _CURRENT.reset(token)
        run.finish()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """A phase of a verb; also as a decorator. Without effect outside of `measured`."""
    run = _CURRENT.get()
    with contextlib.nullcontext() if run is None else run.phase(name):
        yield


def note_calibration(num_samples: int, *, asym: bool) -> None:
    """Record the calibration data of a model; without effect outside of `measured`."""
    run = _CURRENT.get()
    if run is not None:
        run.calibration = CalibrationFacts(num_samples, asym)
