"""How long the phases of a run take: a verb names its phases, and who wants to know them measures around the call.

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
from datetime import datetime, timezone
from typing import Literal

from sparsebit.records.run_record import Environment, Run


class Measured:
    """The time that a run has taken so far. It belongs to the block that measures, and to nothing else."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.phases: dict[str, float] = {}
        self._begin, self._end = time.perf_counter(), 0.0
        self._inner = 0.0  # seconds of the phases that ended inside the one that runs

    @property
    def seconds(self) -> float:
        return (self._end or time.perf_counter()) - self._begin

    def finish(self) -> None:
        self._end = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time of the block is that of the phase, without the phases inside the block."""
        outer, self._inner, begin = self._inner, 0.0, time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - begin
            self.phases[name] = self.phases.get(name, 0.0) + spent - self._inner
            self._inner = outer + spent

    def run(
        self,
        environment: Environment,
        sections: tuple[str, ...],
        made: tuple[Literal["model", "file"], ...] = (),
        warnings: tuple[str, ...] = (),
    ) -> Run:
        """What a record keeps of it."""
        return Run(self.verb, self.started, self.seconds, dict(self.phases), sections, environment, made, warnings)


# What the block around measures with. Context-local: threads and tasks do not see each other's.
_CURRENT: ContextVar[Measured | None] = ContextVar("sparsebit_measured", default=None)


@contextlib.contextmanager
def measured(verb: str) -> Iterator[Measured]:
    """Inside, the phases that verbs go through are timed."""
    run = Measured(verb)
    token = _CURRENT.set(run)
    try:
        yield run
    finally:
        _CURRENT.reset(token)
        run.finish()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """A phase of a verb; also as a decorator. Without effect where nobody measures."""
    run = _CURRENT.get()
    if run is None:
        yield
        return
    with run.phase(name):
        yield
