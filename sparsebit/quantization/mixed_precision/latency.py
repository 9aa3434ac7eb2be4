"""`search_latency`: chooses the layers that stay float, with the least loss within a measured time.

A runtime has 8-bit kernels and float ones: the choice for a layer is between its own bits in the model and float.
Fewer bits are not among the choices: they make a file smaller, not faster. The time of a choice is the sum of
measured regions (the float file and the quantized one, each profiled in the runtime) and of the conversions between
them. The choice is an integer program. Its prediction is then checked: the resulting file is timed in turns with
the float file, and if it is over the limit, the search is repeated with a smaller one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sparsebit.deploy.audit.file_latency import Stopwatch
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.errors import BudgetError, ConfigError
from sparsebit.execution.batches import batches_of
from sparsebit.numerics.choices.integer_program import Budget, choose
from sparsebit.progress import track
from sparsebit.quantization.mixed_precision.candidates import stored_weights
from sparsebit.quantization.mixed_precision.sensitivity import Sensitivity, sensitivity
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.placement_search import PlacementProfile, apply_placement
from sparsebit.quantization.placement_search.candidates import Costs, Floats, cheapest, costs_of, edges, fixed_floats
from sparsebit.quantization.placement_search.profile import Choice
from sparsebit.quantization.placement_search.traced_graph import TracedGraph
from sparsebit.quantization.placement_search.tracing import Traced, traced
from sparsebit.records.phases import phase

log = logging.getLogger(__name__)

_FLOAT, _DEFAULT = "float", "all that can be in integers"
_MOST_TRIES = 5
_TRIAL_S, _FINAL_S = 1.0, 4.0
_GAP = 1e-3
_REST = "(conversions next to layers that are always float)"


@dataclass(frozen=True)
class LatencySearch:
    """The result for one limit, a share of the float file's time.

    `ratio`: the measured time of the chosen file over that of the float file; `predicted`: by the sum of measured
    regions. `default_ratio`, `default_predicted`: of the file with as much in integers as possible. `loss`: the sum of
    the scores of all that is in integers. `floats`: layers that stay float. `qmodel`: the model with that placement;
    `profile`: can be saved, for `quantize(..., placement=...)`.
    """

    limit: float
    ratio: float
    predicted: float
    default_ratio: float
    default_predicted: float
    loss: float
    floats: tuple[str, ...]
    num_layers: int
    tries: int
    qmodel: QuantModel
    profile: PlacementProfile

    def to_dict(self) -> dict[str, Any]:
        names = ("limit", "ratio", "predicted", "default_ratio", "default_predicted", "loss", "num_layers", "tries")
        return {**{name: getattr(self, name) for name in names}, "floats": list(self.floats)}

    def __str__(self) -> str:
        rows = [f"limit {self.limit:.3f} of float's time: {_compared(self.ratio, self.predicted)}"]
        rows.append(f"all in integers: {_compared(self.default_ratio, self.default_predicted)}")
        rows.append(f"{len(self.floats)} of {self.num_layers} layers in float, sum of scores {self.loss:.4g}")
        return "\n".join([*rows, *(f"  {name}" for name in self.floats)])


@phase("latency search")
def search_latency(
    qmodel: QuantModel,
    data: Iterable[Any],
    limits: float | Iterable[float],
    *,
    max_bytes: float | None = None,
    scores: Sensitivity | None = None,
    num_threads: int = 1,
    stopwatch: Stopwatch | None = None,
) -> list[LatencySearch]:
    """The best placement for each limit on the time, from one measurement; the calibrated `qmodel` is not changed.

    `limits`: shares of the float file's time (0.6), one or several. `data`: the calibration batches. The layers that
    cost most accuracy by `sensitivity` become float, as far as the time allows. `scores`: an earlier result of
    `sensitivity`. `max_bytes`: also a limit on the bytes of the layers' weights, as a share of their float size
    (all in 8 bits: 0.25, in 4: 0.125). `num_threads`: of the runtime. A limit that no placement keeps is
    left out with a warning that names the fastest placement; if no limit is kept, that is a `BudgetError`.

    >>> (found,) = search_latency(qmodel, batches, 0.6)  # doctest: +SKIP
    >>> print(found)  # doctest: +SKIP
    limit 0.600 of float's time: measured 0.587, predicted 0.594 by the sum of measured regions (1 % apart)
    """
    wanted = [limits] if isinstance(limits, (int, float)) else list(limits)
    if not wanted or not all(limit > 0 for limit in wanted):
        raise ConfigError(f"latency limits {wanted}: allowed: shares of the float file's time, above 0, as 0.6")
    if (ending := PROFILES[qmodel.config.BACKEND].ending) != ".onnx":
        raise ConfigError(
            f"search_latency() with BACKEND: {qmodel.config.BACKEND}: times are predicted from those of single "
            f"kernels, which a {ending} file does not show; set BACKEND: onnxruntime or openvino, or use "
            "placement='measured'"
        )
    start = time.perf_counter()
    batches = list(batches_of(data))
    found = traced(qmodel, batches, "search_latency", "search_latency()", num_threads, stopwatch)
    judged = scores or sensitivity(qmodel, batches, weight_bits=(), activation_bits=())
    search = _Search(qmodel, found, judged, max_bytes)
    results: list[tuple[float, _Found]] = []
    missed: list[BudgetError] = []
    for limit in track(wanted, "latency limits"):
        try:
            results.append((limit, search.within(limit)))
        except BudgetError as error:
            missed.append(error)
    if not results:
        raise missed[0]
    for reason in missed:
        log.warning("left out: %s", reason)
    seconds = time.perf_counter() - start
    return [search.result(limit, one, found, num_threads, seconds) for limit, one in results]


class _Found(NamedTuple):
    name: str
    floats: Floats
    ratio: float
    tries: int


class _Search:
    """Measures the float file and the one with all in integers; from these it predicts and chooses placements."""

    def __init__(self, qmodel: QuantModel, found: Traced, scores: Sensitivity, max_bytes: float | None) -> None:
        self.qmodel, self.graph, self.watch = qmodel, found.graph, found.watch
        self.runtime = PROFILES[qmodel.config.BACKEND]
        self.fixed = fixed_floats(self.graph)
        everything = frozenset(range(len(self.graph.units)))
        self.files = {_FLOAT: self._file(everything), _DEFAULT: self.graph.file((), self.runtime)}
        timed = self.watch.ratios(self.files, _FINAL_S)
        self.default_ratio, self.noise = timed[_DEFAULT].ratio, timed[_FLOAT].noise
        regions = self.watch.regions({_DEFAULT: self.files[_DEFAULT], _FLOAT: self.files[_FLOAT]})
        self.float_ms = regions[_FLOAT].total_ms
        summed = costs_of(self.graph, regions[_DEFAULT], regions[_FLOAT], self.default_ratio)
        rest = max(0.0, self.float_ms - sum(summed.floating))  # time outside of units: changes of the memory layout
        self.default_predicted = (summed.of(self.graph, self.fixed) + rest) / self.float_ms
        self.costs = _fitted(self.graph, summed, self.fixed, self.float_ms, self.default_ratio)
        own_bits = {name: site.spec.bits for name, site in qmodel.plan.items()}
        self.scores = _unit_scores(self.graph, scores, own_bits)
        sizes = {site: weight.numel() for site, weight in stored_weights(qmodel.model).items()}
        self.bytes = {place: _weight_bytes(self.graph.units[place].weights, sizes, own_bits) for place in self.scores}
        self.max_bytes = max_bytes

    def within(self, limit: float) -> _Found:
        """The best placement whose file kept the limit when it was measured."""
        if limit >= 1 and self.max_bytes is None:
            return _Found(_FLOAT, frozenset(range(len(self.graph.units))), 1.0, 0)
        aim, fastest = limit, self.default_ratio
        for tries in range(1, _MOST_TRIES + 1):
            try:
                floats, is_fastest = self._chosen(aim), False
            except BudgetError:
                if self.max_bytes is not None:
                    in_float, in_integers = (sum(pair[i] for pair in self.bytes.values()) for i in (0, 1))
                    if self.max_bytes * in_float < in_integers or (not in_float and self.max_bytes < 1):
                        raise
                    break
                floats, is_fastest = cheapest(self.graph, self.costs), True  # the file may be faster than predicted
            name = f"limit {limit:g}, try {tries}"
            files = {_FLOAT: self.files[_FLOAT], name: self._file(floats)}
            ratio = self.watch.ratios(files, _TRIAL_S)[name].ratio
            log.debug("%s: aimed at %.3f, predicted %.3f, measured %.3f", name, aim, self.predicted(floats), ratio)
            if ratio <= limit:
                ratio = self.watch.ratios(files, _FINAL_S)[name].ratio
            if ratio <= limit:
                self.files[name] = files[name]
                return _Found(name, floats, ratio, tries)
            fastest = min(fastest, ratio)
            if is_fastest:
                break
            aim = min(aim * limit / ratio, 0.98 * aim)  # by as much as the measurement was over, at least 2 %
        if self.default_ratio <= limit:
            return _Found(_DEFAULT, self.fixed, self.default_ratio, _MOST_TRIES)
        raise BudgetError(
            f"latency limit {limit:g}: no placement was measured to keep it; the fastest took {fastest:.3f} of the "
            f"float file's time (all in integers: {self.default_ratio:.3f}). Give a larger one, or see what "
            'placement="measured" (--placement measured) finds: it tries more placements for the fastest'
        )

    def predicted(self, floats: Floats) -> float:
        """The predicted time, as a share of the float file's."""
        return self.costs.of(self.graph, floats | self.fixed) / self.float_ms

    def _chosen(self, limit: float) -> Floats:
        costs = {str(place): [0.0, score] for place, score in self.scores.items()}
        budgets = [_time_budget(self.graph, self.costs, self.fixed, limit * self.float_ms)]
        if self.max_bytes is not None:
            most = self.max_bytes * sum(in_float for in_float, _ in self.bytes.values())
            budgets.append(Budget("bytes", most, {str(place): list(pair) for place, pair in self.bytes.items()}))
        solved = choose({**costs, _REST: [0.0]}, budgets, gap=_GAP)
        return self.fixed | {place for place in self.scores if solved.options[str(place)] == 0}

    def _left_out(self, floats: Floats) -> frozenset[str]:
        return self.graph.sites_without(floats) & frozenset(self.qmodel.plan)

    def _file(self, floats: Floats) -> bytes:
        left_out = frozenset(self.qmodel.plan) if len(floats) == len(self.graph.units) else self._left_out(floats)
        return self.graph.file(left_out, self.runtime)

    def result(self, limit: float, one: _Found, found: Traced, num_threads: int, seconds: float) -> LatencySearch:
        is_float = one.name == _FLOAT
        left_out = frozenset[str]() if one.name == _DEFAULT else self._left_out(one.floats)
        total = len(self.qmodel.plan)
        ratios = {_FLOAT: 1.0, _DEFAULT: self.default_ratio, one.name: one.ratio}
        counts = {_FLOAT: 0, _DEFAULT: total, one.name: 0 if is_float else total - len(left_out)}
        choices = []
        for name, ratio in ratios.items():
            sqnr = None if name == _FLOAT else self.watch.sqnr_db(name, self.files[name], self.files[_FLOAT])
            choices.append(Choice(name, ratio, sqnr, counts[name], "chosen" if name == one.name else ""))
        profile = PlacementProfile.measured(
            *(self.qmodel, found.runtime, num_threads, () if is_float else left_out),
            is_float=is_float,
            shapes=found.shapes,
            ratio=one.ratio,
            default_ratio=self.default_ratio,
            noise=self.noise,
            seconds=seconds,
            choices=tuple(choices),
        )
        layers = {place: unit.layer for place, unit in enumerate(self.graph.units) if unit.layer}
        return LatencySearch(
            limit=limit,
            ratio=one.ratio,
            predicted=1.0 if is_float else self.predicted(one.floats),
            default_ratio=self.default_ratio,
            default_predicted=self.default_predicted,
            loss=sum((score for place, score in self.scores.items() if place not in one.floats), 0.0),
            floats=tuple(layer for place, layer in layers.items() if place in one.floats),
            num_layers=len(layers),
            tries=one.tries,
            qmodel=apply_placement(self.qmodel, profile),
            profile=profile,
        )


def _weight_bytes(sites: Iterable[str], sizes: Mapping[str, int], own_bits: Mapping[str, int]) -> tuple[float, float]:
    """The bytes of a unit's stored weights in float and in integers."""
    stored = [site for site in sites if site in sizes]
    return sum(4.0 * sizes[site] for site in stored), sum(sizes[site] * own_bits[site] / 8 for site in stored)


def _unit_scores(graph: TracedGraph, scores: Sensitivity, own_bits: Mapping[str, int]) -> dict[int, float]:
    """By place: each unit's score in integers, that of its weights plus its share of each tensor that it reads.

    A site's score is that of its own bits; scores may also contain other bits.
    """
    of_site = {}
    for site, row in scores.scores.items():
        if site in own_bits and own_bits[site] not in row:
            raise ConfigError(
                f"search_latency(scores=...): {site} has {own_bits[site]} bits, and scores for "
                f"{', '.join(map(str, sorted(row)))} alone; measure them with sensitivity() on this model"
            )
        of_site[site] = row[own_bits[site]] if site in own_bits else 0.0
    readers: dict[str, set[int]] = {}
    for link in graph.links:
        for site in link.sites:
            place = link.producer if link.consumer < 0 else link.consumer
            readers.setdefault(graph.owners.get(site, site), set()).add(place)
    integer = {place: unit for place, unit in enumerate(graph.units) if unit.can_be_integer}
    found = {place: sum(of_site.get(site, 0.0) for site in unit.weights) for place, unit in integer.items()}
    for site, places in readers.items():
        for place in places & found.keys():
            found[place] += of_site.get(site, 0.0) / len(places)
    return found


def _fitted(graph: TracedGraph, costs: Costs, fixed: Floats, float_ms: float, ratio: float) -> Costs:
    """The costs, scaled so that those of both measured files add up to the measured times.

    Time outside of units (changes of the memory layout, mainly in the float file) is spread over the units.
    """
    floating_ms, integer_ms = sum(costs.floating), sum(ms for p, ms in enumerate(costs.integer) if p not in fixed)
    up = float_ms / floating_ms if floating_ms else 1.0
    floating = tuple(up * ms for ms in costs.floating)
    others = costs.of(graph, fixed) - sum(costs.floating[place] for place in fixed) - integer_ms  # conversions
    wanted = ratio * float_ms - others - sum(floating[place] for place in fixed)
    scale = wanted / integer_ms if integer_ms and wanted > 0 else 1.0
    return Costs(tuple(scale * ms for ms in costs.integer), floating, costs.per_element)


def _time_budget(graph: TracedGraph, costs: Costs, fixed: Floats, limit_ms: float) -> Budget:
    """Milliseconds: of each unit in float and in integers, and of a conversion between two units that differ."""
    own = {place: [costs.floating[place], costs.integer[place]] for place in range(len(graph.units))}
    pairs: dict[tuple[str, str], list[list[float]]] = {}
    for left, right, num_elements in edges(graph):
        conversion = costs.of_conversion(num_elements)
        ends = sorted({left, right} - fixed)
        if len(ends) == 2:
            table = pairs.setdefault((str(ends[0]), str(ends[1])), [[0.0, 0.0], [0.0, 0.0]])
            table[0][1] += conversion
            table[1][0] += conversion
        elif len(ends) == 1 and left != right:
            own[ends[0]][1] += conversion
    always = sum(costs.floating[place] for place in fixed)
    rows: Mapping[str, list[float]] = {str(place): row for place, row in own.items() if place not in fixed}
    return Budget("latency", limit_ms, {**rows, _REST: [always]}, pairs)


def _compared(measured: float, predicted: float) -> str:
    apart = f"{abs(predicted / measured - 1):.0%} apart" if measured else "not measured"
    return f"measured {measured:.3f}, predicted {predicted:.3f} by the sum of measured regions ({apart})"
