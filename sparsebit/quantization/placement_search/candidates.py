"""Candidate placements, as sets of units that run in float: families, and the cheapest cut by measured times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparsebit.deploy.audit.region_times import RegionTimes
from sparsebit.quantization.placement_search.minimum_cut import cheapest_split
from sparsebit.quantization.placement_search.traced_graph import TracedGraph

Floats = frozenset[int]

# A conversion reads and writes every element once: about this time is assumed if none was measured (milliseconds).
_USUAL_MS = 4e-7
_PER_CALL_MS = 2e-3
_LIGHT = ("add", "concat", "pooling", "activation", "product")
_FAMILIES = {
    "adds in float": ("add",),
    "concats in float": ("concat",),
    "poolings in float": ("pooling",),
    "activations in float": ("activation",),
    "depthwise convolutions in float": ("depthwise convolution",),
    "all but convolutions and linears in float": _LIGHT,
    "linears alone in integers": ("convolution", "depthwise convolution", *_LIGHT),
}


@dataclass(frozen=True)
class Costs:
    """Milliseconds of every unit in integers and in float, and of a conversion per element."""

    integer: tuple[float, ...]
    floating: tuple[float, ...]
    per_element: float

    def of(self, graph: TracedGraph, floats: Floats) -> float:
        """The predicted time of a placement."""
        total = sum((self.floating if p in floats else self.integer)[p] for p in range(len(self.integer)))
        return total + sum(self.of_conversion(n) for n in _converted(graph, floats))

    def of_conversion(self, num_elements: int) -> float:
        return _PER_CALL_MS + self.per_element * num_elements


def costs_of(graph: TracedGraph, quantized: RegionTimes, floating: RegionTimes, ratio: float) -> Costs:
    """From the measured regions of a quantized file and of the float one.

    `ratio`: of the times of both files without a profiler, which slows integer kernels more than others. The times of
    the quantized file are scaled to this ratio.
    """
    scale = ratio * floating.total_ms / quantized.total_ms if quantized.total_ms else 1.0
    integer_ms, float_ms = quantized.by_layer(), floating.by_layer()
    converted = sum(_converted(graph, fixed_floats(graph)))
    spent = scale * quantized.conversion_ms
    per_element = spent / converted if converted and spent else _USUAL_MS
    return Costs(
        tuple(scale * sum(integer_ms.get(name, 0.0) for name in unit.nodes) for unit in graph.units),
        tuple(sum(float_ms.get(name, 0.0) for name in unit.nodes) for unit in graph.units),
        min(per_element, 10 * _USUAL_MS),
    )


def _converted(graph: TracedGraph, floats: Floats) -> list[int]:
    """The sizes of the tensors that a placement converts."""
    return [n for left, right, n in edges(graph) if (left in floats) != (right in floats)]


def fixed_floats(graph: TracedGraph) -> Floats:
    """The units that the default placement runs in float."""
    return frozenset(place for place, unit in enumerate(graph.units) if not unit.can_be_integer)


def cheapest(graph: TracedGraph, costs: Costs) -> Floats:
    """The placement with the least sum of units and conversions."""
    fixed = fixed_floats(graph)
    integer = [math.inf if place in fixed else ms for place, ms in enumerate(costs.integer)]
    conversions = [(left, right, costs.of_conversion(n)) for left, right, n in edges(graph)]
    sides = cheapest_split(integer, costs.floating, conversions)
    return frozenset(place for place, is_integer in enumerate(sides) if not is_integer)


def families(graph: TracedGraph) -> Iterator[tuple[str, Floats]]:
    """Whole kinds of ops in float, if the model has some in integers and also other ops."""
    fixed = fixed_floats(graph)
    free = [place for place in range(len(graph.units)) if place not in fixed]
    for name, kinds in _FAMILIES.items():
        chosen = {place for place in free if graph.units[place].kind in kinds}
        if chosen and len(chosen) < len(free):
            yield name, fixed | chosen
    weighted = [place for place in free if graph.units[place].weights]
    if len(weighted) > 2:
        yield "the first and the last layer in float", fixed | {weighted[0], weighted[-1]}


def islands(graph: TracedGraph, floats: Floats) -> Iterator[tuple[str, Floats]]:
    """The placement with one connected part of it changed: an integer part to float, or a float one to integers."""
    fixed = fixed_floats(graph)
    free = [place for place in range(len(graph.units)) if place not in fixed]
    for is_float in (True, False):
        rest = {place for place in free if (place in floats) == is_float}
        while rest:
            part = _component(graph, rest)
            rest -= part
            first = min(part)
            where = graph.units[first].layer or graph.units[first].nodes[0]
            size = f"{len(part)} ops from {where} on" if len(part) > 1 else where
            if is_float:
                yield f"{size} in integers", floats - part
            else:
                yield f"{size} in float", floats | part


def singles(graph: TracedGraph, gains: Sequence[float], floats: Floats) -> Iterator[tuple[str, Floats]]:
    """Single integer units that are cheaper in float by the cost model, the most promising first."""
    for place in sorted(range(len(graph.units)), key=lambda place: -gains[place]):
        if place not in floats and gains[place] > 0:
            yield f"{graph.units[place].layer or graph.units[place].nodes[0]} in float", floats | {place}


def _component(graph: TracedGraph, among: set[int]) -> set[int]:
    """The units that are connected with the first one."""
    near: dict[int, set[int]] = {place: set() for place in among}
    for left, right, _ in edges(graph):
        if left in among and right in among:
            near[left].add(right)
            near[right].add(left)
    found: set[int] = set()
    new = {min(among)}
    while new:
        found |= new
        new = set().union(*(near[place] for place in new)) - found
    return found


def edges(graph: TracedGraph) -> Iterator[tuple[int, int, int]]:
    """Pairs of units with a tensor between them, and its size; a tensor with several readers counts once per reader."""
    for link in graph.links:
        if link.producer >= 0 and link.consumer >= 0:
            yield link.producer, link.consumer, link.num_elements
