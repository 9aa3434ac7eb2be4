"""`measure_placement`: the fastest placement of a calibrated model on this machine that keeps its accuracy.

The model is traced once. Every candidate is that graph with other quantizers left out, as the export would write it, so
a candidate takes a second; a program of another runtime takes as long as its compiler. All in float is always a
candidate, so the result is never slower than float.

The loop (`_Search.run`): time a candidate in turns with float and the best one, profile its kernels, add the profile to
`LearnedCosts`, and let these propose the next candidate. A candidate replaces the best one if it is clearly faster and
its outputs, or the user's metric, are as good as the default placement's. Without a profiler (programs), the candidates
are whole kinds of ops in float.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from sparsebit.deploy.audit.file_latency import Stopwatch
from sparsebit.deploy.audit.region_times import RegionTimes
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.errors import DeploymentError, users_level
from sparsebit.folders import replace_file
from sparsebit.progress import track
from sparsebit.quantization.inspecting.accuracy_gains import score_of
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.placement_search import candidates
from sparsebit.quantization.placement_search.candidates import Floats
from sparsebit.quantization.placement_search.learned_costs import LearnedCosts
from sparsebit.quantization.placement_search.profile import Choice, PlacementProfile
from sparsebit.quantization.placement_search.tracing import Traced, traced
from sparsebit.records.phases import phase

log = logging.getLogger(__name__)

_GAIN = 0.005  # a candidate must be faster by this much: smaller gains are noise
_TRIAL_S, _FINAL_S = 1.0, 4.0
_HOPELESS = 1.25  # a family with a predicted time above the best by this factor is not timed
_MOST_CUTS = 12
_FLOAT, _DEFAULT = "float", "default"

Metric = Callable[[QuantModel], float]


@dataclass(frozen=True)
class MeasuredPlacement:
    """`qmodel`: the model with the chosen placement, calibrated; `profile`: the measurements, to be saved."""

    qmodel: QuantModel
    profile: PlacementProfile


@phase("placement")
def measure_placement(
    qmodel: QuantModel,
    batches: Iterable[Any],
    *,
    seconds: float = 60.0,
    margin_db: float = 1.0,
    metric: Metric | None = None,
    metric_margin: float = 0.005,
    num_threads: int = 1,
    keep: str | os.PathLike[str] | None = None,
    stopwatch: Stopwatch | None = None,
) -> MeasuredPlacement:
    """Try placements of a calibrated model in its runtime, and return the fastest one that keeps the accuracy.

    `batches`: as for calibration; files are timed and compared on the first samples. `seconds`: about how long
    candidates are tried, without the time of `metric`; float, the default placement and the one that the measured times
    suggest are always tried.
    `margin_db`: by how much the SQNR of the outputs may be below the default placement's. `metric`: returns a score of
    a model, higher is better; the chosen one may lose `metric_margin` of the default placement's score, and one that
    does not lose more may have any SQNR. `num_threads`: of the runtime. `keep`: a folder for the timed files:
    `float.onnx`, `default.onnx` and `measured.onnx`, or with the runtime's own ending.
    `qmodel` is not changed.
    """
    start = time.perf_counter()
    ready = traced(qmodel, batches, "measure_placement", "placement='measured'", num_threads, stopwatch)
    judge = None if metric is None else _judge_of(qmodel, metric, metric_margin)
    search = _Search(qmodel, ready, margin_db, judge, time.perf_counter() + seconds)
    search.run()
    chosen, noise = search.confirmed()
    if judge is not None and chosen != _FLOAT:
        chosen = search.judged(judge)
    left_out = search.left_out[chosen]
    if keep is not None:
        Path(keep).mkdir(parents=True, exist_ok=True)
        ending = PROFILES[qmodel.config.BACKEND].ending
        for name, file in ((_FLOAT, _FLOAT), (_DEFAULT, _DEFAULT), ("measured", chosen)):
            replace_file(Path(keep) / f"{name}{ending}", partial(Path.write_bytes, data=search.files[file]))
    profile = PlacementProfile.measured(
        *(qmodel, ready.runtime, num_threads, left_out),
        is_float=chosen == _FLOAT,
        shapes=ready.shapes,
        ratio=search.ratio[chosen],
        default_ratio=search.ratio[_DEFAULT],
        noise=noise,
        seconds=time.perf_counter() - start,
        choices=search.table(chosen),
    )
    log.info("placement measured in %.0f s: %s", profile.seconds, profile.words)
    return MeasuredPlacement(_applied(qmodel, profile), profile)


def apply_placement(qmodel: QuantModel, placement: PlacementProfile | str | os.PathLike[str]) -> QuantModel:
    """The calibrated model with the placement of a profile, or of its file.

    A profile of another model or backend is an error. One of another processor or version of the runtime is used with a
    warning: its times are not those of this machine.
    """
    profile = placement if isinstance(placement, PlacementProfile) else PlacementProfile.load(placement)
    if differences := profile.check(qmodel):
        warnings.warn(
            f"the placement profile was measured elsewhere ({'; '.join(differences)}); what is fast there may not be "
            "here: placement='measured' measures again",
            stacklevel=users_level(),
        )
    return _applied(qmodel, profile)


def _applied(qmodel: QuantModel, profile: PlacementProfile) -> QuantModel:
    plan = profile.plan_of(qmodel.plan)
    placed = qmodel if len(plan) == len(qmodel.plan) else qmodel.with_plan(plan)
    placed.placement = profile
    return placed


_Judge = Callable[[frozenset[str]], bool]


def _judge_of(qmodel: QuantModel, metric: Metric, margin: float) -> _Judge:
    """Whether placements keep the score of the default one; each is scored once."""

    @cache
    def score(left_out: frozenset[str]) -> float:
        model = qmodel.with_plan(qmodel.plan.replace(dict.fromkeys(left_out))) if left_out else qmodel
        return score_of(metric, model, "measure_placement(): the metric")

    return lambda left_out: not left_out or score(left_out) >= score(frozenset()) - margin


class _Search:
    """The candidates tried so far, and the best of them."""

    def __init__(
        self, qmodel: QuantModel, ready: Traced, margin_db: float, judge: _Judge | None, deadline: float
    ) -> None:
        graph = ready.graph
        self.qmodel, self.graph, self.watch, self.deadline = qmodel, graph, ready.watch, deadline
        self.margin_db, self.judge, self.is_profiled = margin_db, judge, ready.is_profiled
        self.runtime = PROFILES[qmodel.config.BACKEND]
        everything = frozenset(range(len(graph.units)))
        self.floats: dict[str, Floats] = {_FLOAT: everything, _DEFAULT: candidates.fixed_floats(graph)}
        self.left_out = {_FLOAT: frozenset(qmodel.plan), _DEFAULT: frozenset[str]()}
        # The default keeps every site of the plan, including those that no integer unit reads.
        self.files = {name: graph.file(left_out, self.runtime) for name, left_out in self.left_out.items()}
        self.ratio: dict[str, float] = {_FLOAT: 1.0}
        self.sqnr: dict[str, float] = {}
        self.verdict: dict[str, str] = {}
        self.best = _DEFAULT
        self.costs, self.float_ms = LearnedCosts(graph), 1.0

    def run(self) -> None:
        timed = self.watch.ratios(self.files, _TRIAL_S)
        self.ratio[_DEFAULT] = timed[_DEFAULT].ratio
        self.sqnr[_DEFAULT] = self._sqnr(_DEFAULT)
        if self.is_profiled:
            self._learn_first()
        for name, floats in track(self._more() if self.is_profiled else self._unprofiled(), "placement"):
            if time.perf_counter() > self.deadline:
                break
            self.attempt(name, floats)

    def _learn_first(self) -> None:
        times = self.watch.regions({name: self.files[name] for name in (_DEFAULT, _FLOAT)})
        self.float_ms = times[_FLOAT].total_ms
        for name, regions in times.items():
            self._learn(name, regions)
        self.attempt("sites that serve integer layers", candidates.fixed_floats(self.graph))
        self.attempt("cheapest by measured times", self.costs.cheapest())

    def _unprofiled(self) -> Iterator[tuple[str, Floats]]:
        """Candidates for a runtime whose kernels cannot be timed one by one."""
        yield "sites that serve integer layers", candidates.fixed_floats(self.graph)
        yield from candidates.families(self.graph)

    def _more(self) -> Iterator[tuple[str, Floats]]:
        """Further candidates: the cheapest by the costs so far, kinds of ops in float, changes to the best one."""
        yield from self._cheapest()
        for weight in (0.7, 1.4):
            yield f"cheapest, conversions x {weight:g}", self.costs.cheapest(weight)
        for name, floats in candidates.families(self.graph):
            if self.costs.of(floats) < _HOPELESS * self.costs.of(self.floats[self.best]):
                yield name, floats
        begun = ""
        while begun != self.best and self.best != _FLOAT:
            begun = self.best
            yield from self._cheapest()
            floats = self.floats[self.best]
            expected = self.costs.of(floats)
            places = range(len(self.graph.units))
            gains = [self.costs.of_unit(p, is_float=False) - self.costs.of_unit(p, is_float=True) for p in places]
            found = [*candidates.islands(self.graph, floats), *candidates.singles(self.graph, gains, floats)]
            parts = sorted(((self.costs.of(changed), name, changed) for name, changed in found), key=lambda one: one[0])
            for ms, name, changed in parts:
                if ms < 1.05 * expected:
                    yield name, changed ^ floats ^ self.floats[self.best]

    def _cheapest(self) -> Iterator[tuple[str, Floats]]:
        """The cheapest placement by the costs so far, again and again, until it is one that was tried already."""
        for _ in range(_MOST_CUTS):
            floats = self.costs.cheapest()
            if self._left_out(floats) in self.left_out.values():
                return
            yield "cheapest by the times so far", floats

    def _left_out(self, floats: Floats) -> frozenset[str]:
        return self.graph.sites_without(floats) & frozenset(self.qmodel.plan)

    def attempt(self, name: str, floats: Floats) -> None:
        """Time a candidate in turns with float and the best; keep it if it is faster and exact enough."""
        left_out = self._left_out(floats)
        if left_out in self.left_out.values() or len(left_out) == len(self.qmodel.plan):
            return
        names = itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2)))
        name = next(free for free in names if free not in self.left_out)
        self.floats[name], self.left_out[name] = floats, left_out
        try:
            file = self.graph.file(left_out, self.runtime)
            files = {_FLOAT: self.files[_FLOAT], self.best: self.files[self.best], name: file}
            timed = self.watch.ratios(files, _TRIAL_S)
        except DeploymentError as error:  # the runtime lacks a kernel: skip the candidate
            log.debug("%s: %s", name, error)
            self.verdict[name], self.ratio[name] = "does not run", float("inf")
            return
        self.ratio[name] = timed[name].ratio
        if self.is_profiled:
            self._learn(name, self.watch.regions({name: file})[name])
        if timed[name].ratio > (1 - _GAIN) * timed[self.best].ratio:
            self.verdict[name] = "not faster"
            return
        self.files[name] = file
        self.sqnr[name] = self._sqnr(name)
        if not self._is_exact_enough(name):
            self.verdict[name] = "less exact"
            del self.files[name]
            return
        self.verdict[name] = "faster"
        for old in [old for old in self.files if old not in (_FLOAT, _DEFAULT, name, self.best)]:
            del self.files[old]
        self.best = name

    def confirmed(self) -> tuple[str, float]:
        """The winner of a longer run between float, the default placement and the best one; the noise."""
        names = dict.fromkeys((_FLOAT, _DEFAULT, self.best))
        timed = self.watch.ratios({name: self.files[name] for name in names}, _FINAL_S)
        self.ratio |= {name: one.ratio for name, one in timed.items()}
        winner = min(timed, key=lambda name: (self.ratio[name], name == _FLOAT))
        return winner if self.ratio[winner] <= 1 - _GAIN else _FLOAT, timed[_FLOAT].noise

    def _is_exact_enough(self, name: str) -> bool:
        if self.sqnr[name] >= self.sqnr[_DEFAULT] - self.margin_db:
            return True
        if self.judge is None:
            return False
        started = time.perf_counter()
        keeps = self.judge(self.left_out[name])
        self.deadline += time.perf_counter() - started  # the user's metric does not count against `seconds`
        return keeps

    def judged(self, judge: _Judge) -> str:
        """The fastest placement whose score is near enough to that of the default one."""
        faster = [name for name in self.files if self.ratio.get(name, 2.0) < 1]
        for name in sorted(faster, key=self.ratio.__getitem__):
            if judge(self.left_out[name]):
                return name
            self.verdict[name] = "loses by the metric"
        return _FLOAT

    def table(self, chosen: str) -> tuple[Choice, ...]:
        total, verdicts = len(self.qmodel.plan), {**self.verdict, chosen: "chosen"}
        return tuple(
            Choice(name, ratio, self.sqnr.get(name), total - len(self.left_out[name]), verdicts.get(name, ""))
            for name, ratio in self.ratio.items()
        )

    def _learn(self, name: str, times: RegionTimes) -> None:
        """Learn from measured regions, scaled to the measured ratio: profiled kernels are slower."""
        scale = self.ratio[name] * self.float_ms / times.total_ms if times.total_ms else 1.0
        self.costs.learn(self.floats[name], times, scale)

    def _sqnr(self, name: str) -> float:
        return self.watch.sqnr_db(name, self.files[name], self.files[_FLOAT])
