"""Measures the latency of several runs in turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from sparsebit.records.audit import Latency

# The shortest length of one sample: shorter ones would measure the clock and the interpreter.
_MIN_SAMPLE_S = 2e-3
_MAX_ROUNDS = 2000


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    *,
    budget_s: float = 5.0,
    num_rounds: int | None = None,
    min_rounds: int = 5,
    warmup: int = 2,
) -> dict[str, Latency]:
    """Time every run once per round, in turns, for about `budget_s` seconds or exactly `num_rounds` rounds.

    The first run is the reference of the ratios. Each starts with `warmup` calls that do not count, and
    every second round is in reverse order, since a run after a larger one finds the caches cold.

    >>> latency = interleaved({"float": lambda: sum(range(2000)), "int8": lambda: sum(range(500))}, num_rounds=3)
    >>> latency["int8"].num_rounds
    3
    """
    if not runs:
        return {}
    calls = {name: _calls_per_round(run, warmup) for name, run in runs.items()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    names, start = list(runs), time.perf_counter()
    for done in range(num_rounds or _MAX_ROUNDS):
        for name in names if done % 2 == 0 else reversed(names):
            samples[name].append(_timed(runs[name], calls[name]))
        if num_rounds is None and done + 1 >= min_rounds and time.perf_counter() - start > budget_s:
            break
    first = [list(clock) for clock in zip(*samples[names[0]], strict=True)]
    found = {}
    for name in names:
        clocks = [list(clock) for clock in zip(*samples[name], strict=True)]
        medians, quartiles = [statistics.median(clock) * 1e3 for clock in clocks], [*map(_quartiles_ms, clocks)]
        wall, cpu = zip(medians, quartiles, strict=True)
        values: list[Any] = [*wall, *cpu, *map(_ratio, clocks, first), len(samples[name]), calls[name]]
        found[name] = Latency(*values)
    return found


def _calls_per_round(run: Callable[[], object], warmup: int) -> int:
    """Warm up, then determine how many calls make one sample."""
    for _ in range(warmup):
        run()
    return max(1, math.ceil(_MIN_SAMPLE_S / max(_timed(run, 1)[0], 1e-6)))


def _timed(run: Callable[[], object], calls: int) -> tuple[float, float]:
    """Wall and CPU seconds of one call, averaged over `calls` of them."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - wall) / calls, (time.process_time() - cpu) / calls


def _ratio(mine: list[float], first: list[float]) -> float:
    pairs = [one / other for one, other in zip(mine, first, strict=True) if other > 0]
    return statistics.median(pairs) if pairs else math.nan


def _quartiles_ms(samples: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    return low * 1e3, high * 1e3
