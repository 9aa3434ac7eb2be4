"""One judge's codes and outputs against the exact run of the file that begins with these codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy

from tests.differential.exact_run import ExactFile, Stretch, Trace
from tests.differential.rules import FLOAT_ERROR, POSITION_ERROR, rules_for


@dataclass(frozen=True)
class Difference:
    """At a site or an output. `size`: beyond what float32 explains, in steps, or relative to the largest number.

    `why`: the rule that explains it; empty for a fault.
    """

    judge: str
    end: str
    ops: frozenset[str]
    size: float
    why: str
    details: str = ""

    def __str__(self) -> str:
        return f"{self.judge}: {self.end} after {', '.join(sorted(self.ops))}: {self.size:.3g} too far; {self.details}"


def differences(judge: str, file: ExactFile, trace: Trace, found: Mapping[str, Any]) -> list[Difference]:
    """`trace`: the exact run that was given the codes in `found`."""
    compared = ((end, stretch) for end, stretch in file.stretches.items() if end in found)
    both = (_at(judge, file, trace, stretch, found[end]) for end, stretch in compared)
    return [difference for difference in both if difference is not None]


def _at(judge: str, file: ExactFile, trace: Trace, stretch: Stretch, found: Any) -> Difference | None:
    magnitude = file.magnitude(stretch, trace)
    if stretch.end in trace.positions:
        return _at_site(judge, file, trace, stretch, found, magnitude)
    expected = trace.values[stretch.end]
    if expected.shape != found.shape:
        return Difference(judge, stretch.end, stretch.ops, numpy.inf, "", f"shape {found.shape}, not {expected.shape}")
    if expected.dtype.kind != "f":
        return None
    gap = numpy.abs(found.astype(numpy.float64) - expected)
    gap = numpy.where(numpy.isfinite(expected) | numpy.isfinite(found), numpy.nan_to_num(gap, nan=numpy.inf), 0.0)
    allowed = FLOAT_ERROR * magnitude + 1e-30
    if gap.size == 0 or gap.max() <= allowed:
        return None
    where = numpy.unravel_index(int(gap.argmax()), gap.shape)
    size = float(gap.max() / magnitude) if magnitude else numpy.inf
    details = f"{found[where]:.9g}, not {expected[where]:.9g}, {int((gap > allowed).sum())} of {gap.size}"
    step = _source_step(trace, stretch)
    rules = [
        rule
        for rule in rules_for(judge, stretch.ops, file.graph)
        if size <= rule.relative or gap.max() <= rule.source_steps * step + allowed
    ]
    return Difference(judge, stretch.end, stretch.ops, size, rules[0].why if rules else "", details)


def _at_site(
    judge: str, file: ExactFile, trace: Trace, stretch: Stretch, found: Any, magnitude: float
) -> Difference | None:
    grid, position = trace.grids[stretch.end], trace.positions[stretch.end]
    position = position[tuple(slice(0, size) for size in found.shape)]
    if position.shape != found.shape:
        return Difference(judge, stretch.end, stretch.ops, numpy.inf, "", f"shape {found.shape}, not {position.shape}")
    known = numpy.isfinite(position)
    wanted = numpy.clip(numpy.where(known, position, 0.0), grid.low, grid.high)
    slack = 0.5 + POSITION_ERROR * numpy.maximum(numpy.abs(wanted), 1) + FLOAT_ERROR * magnitude / grid.scale
    gap = numpy.where(known, numpy.abs(found.astype(numpy.float64) - wanted) - slack, 0.0)
    if gap.size == 0 or gap.max() <= 0:
        return None
    where = numpy.unravel_index(int(gap.argmax()), gap.shape)
    details = f"code {int(found[where])}, not {position[where]:.6f}, {int((gap > 0).sum())} of {gap.size}"
    size = float(gap.max())
    step = _source_step(trace, stretch) / float(numpy.min(grid.scale))
    rules = [
        rule for rule in rules_for(judge, stretch.ops, file.graph) if size <= max(rule.steps, rule.source_steps * step)
    ]
    return Difference(judge, stretch.end, stretch.ops, size, rules[0].why if rules else "", details)


def _source_step(trace: Trace, stretch: Stretch) -> float:
    """The largest step of the grids that a stretch begins with."""
    return max((float(numpy.max(trace.grids[site].scale)) for site in stretch.sources), default=0.0)
