"""The times of units and conversions, learned from every profiled file, and the cheapest placement by them.

One profile is not enough: in the file with all in integers there is no conversion between an integer convolution and a
float one, which also changes the memory layout and takes several times as long as other conversions. So each candidate
is profiled, whether it is fast or not, and its measurements replace assumptions.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sparsebit.deploy.audit.region_times import RegionTimes
from sparsebit.quantization.placement_search.candidates import Floats, fixed_floats
from sparsebit.quantization.placement_search.minimum_cut import cheapest_split
from sparsebit.quantization.placement_search.traced_graph import TracedGraph

# Assumed if no conversion of a direction was measured (milliseconds per element, and per call).
_USUAL_MS, _PER_CALL_MS = 1e-6, 2e-3
Direction = Literal["to integers", "to float"]


@dataclass(frozen=True)
class _Transfer:
    """The result of one unit, and the units that read it. The model's inputs and outputs are one unit, always float."""

    producer: int
    consumers: tuple[int, ...]
    num_elements: int

    def direction(self, floats: Floats) -> Direction | None:
        """How it is converted in a placement; None if all its readers are on its producer's side."""
        is_float = self.producer in floats
        if all((consumer in floats) == is_float for consumer in self.consumers):
            return None
        return "to integers" if is_float else "to float"


class LearnedCosts:
    """Milliseconds of every unit, in integers and in float, and of every conversion: means over the profiles."""

    def __init__(self, graph: TracedGraph) -> None:
        self.fixed = fixed_floats(graph)
        self.size = len(graph.units)
        self.transfers = tuple(_transfers(graph))
        self._unit_of = {node: place for place, unit in enumerate(graph.units) for node in unit.nodes}
        self._units: dict[tuple[int, bool], list[float]] = defaultdict(list)
        self._conversions: dict[tuple[int, Direction], list[float]] = defaultdict(list)
        self._rates: dict[Direction, float] = {"to integers": _USUAL_MS, "to float": _USUAL_MS}

    def learn(self, floats: Floats, times: RegionTimes, scale: float) -> None:
        """Add the regions of a file; `scale` converts its times to those of a run without a profiler."""
        outside = floats | {self.size}
        spent = [0.0] * self.size
        for layer, ms in times.by_layer().items():
            if (place := self._unit_of.get(layer)) is not None:
                spent[place] += scale * ms
        behind: dict[int, float] = defaultdict(float)
        for region in times.regions:
            if not region.layers:
                behind[self._unit_of.get(region.behind, self.size)] += scale * region.ms
        for transfer in self.transfers:
            direction = transfer.direction(outside)
            if direction is not None:
                self._conversions[transfer.producer, direction].append(behind.pop(transfer.producer, 0.0))
        for (
            place,
            ms,
        ) in behind.items():  # a change of the memory layout between two units that are both float or integer
            if place < self.size:
                spent[place] += ms
        for place, ms in enumerate(spent):
            self._units[place, place in floats].append(ms)
        self._fit()

    def _fit(self) -> None:
        sizes = {transfer.producer: transfer.num_elements for transfer in self.transfers}
        for direction in self._rates:
            seen = [(sizes[place], _mean(ms)) for (place, way), ms in self._conversions.items() if way == direction]
            elements = sum(size for size, _ in seen)
            if elements:
                self._rates[direction] = max(0.0, sum(ms - _PER_CALL_MS for _, ms in seen)) / elements

    def of_unit(self, place: int, *, is_float: bool) -> float:
        """The time of a unit; for a side that was never measured, its time on the other side."""
        return _mean(self._units.get((place, is_float)) or self._units.get((place, not is_float)) or [0.0])

    def of_conversion(self, transfer: _Transfer, direction: Direction) -> float:
        seen = self._conversions.get((transfer.producer, direction))
        return _mean(seen) if seen else _PER_CALL_MS + self._rates[direction] * transfer.num_elements

    def of(self, floats: Floats) -> float:
        """The predicted time of a placement."""
        outside = floats | {self.size}
        total = sum(self.of_unit(place, is_float=place in floats) for place in range(self.size))
        for transfer in self.transfers:
            direction = transfer.direction(outside)
            if direction is not None:
                total += self.of_conversion(transfer, direction)
        return total

    def cheapest(self, weight: float = 1.0) -> Floats:
        """The placement with the least predicted time, with conversions at `weight` times their cost."""
        places = range(self.size)
        integer = [math.inf if place in self.fixed else self.of_unit(place, is_float=False) for place in places]
        floating = [self.of_unit(place, is_float=True) for place in places]
        # A tensor is converted once for all its readers. A plain edge per reader would count it several times, so each
        # transfer and direction has a helper node: the edge between producer and helper costs the conversion, and
        # infinite edges put the helper on the other side as soon as one reader is there.
        zeros = [0.0] * (2 * len(self.transfers))
        integer, floating = [*integer, math.inf, *zeros], [*floating, 0.0, *zeros]
        paid: list[tuple[int, int, float]] = []
        for up, transfer in zip(itertools.count(self.size + 1, 2), self.transfers, strict=False):
            paid.append((transfer.producer, up, weight * self.of_conversion(transfer, "to float")))
            paid += [(up, consumer, math.inf) for consumer in transfer.consumers]
            paid.append((up + 1, transfer.producer, weight * self.of_conversion(transfer, "to integers")))
            paid += [(consumer, up + 1, math.inf) for consumer in transfer.consumers]
        sides = cheapest_split(integer, floating, paid, both_ways=False)
        return frozenset(place for place in places if not sides[place])


def _transfers(graph: TracedGraph) -> Iterator[_Transfer]:
    outside = len(graph.units)
    readers: dict[int, dict[int, None]] = defaultdict(dict)
    sizes: dict[int, int] = defaultdict(int)
    for link in graph.links:
        producer = link.producer if link.producer >= 0 else outside
        readers[producer][link.consumer if link.consumer >= 0 else outside] = None
        sizes[producer] = max(sizes[producer], link.num_elements)
    for producer, consumers in readers.items():
        yield _Transfer(producer, tuple(consumers), sizes[producer])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
