"""When memory is written in a graph: a quantizer makes a copy, so it must not be placed before such writes."""

from __future__ import annotations

from bisect import bisect_left

from torch import fx

from sparsebit.graph.nodes.aliasing import Families, may_alias, written_by

IN_PLACE = "writes in place into memory that is read elsewhere: its input stays in float, its result is quantized"


class Writes:
    """The in-place writes of a graph as it is now, by the values whose memory they change."""

    def __init__(self, root: fx.GraphModule, *, outside: bool = False) -> None:
        """`outside`: whether other code may write into the graph's inputs after it has run."""
        self._order = {node: index for index, node in enumerate(root.graph.nodes)}
        self._families = Families()
        self._sources: list[tuple[int, fx.Node]] = []
        for node, index in self._order.items():
            for other in may_alias(node, root):
                self._families.join(node, other)
            self._sources += [(index, source) for source in written_by(node, root)]
        self._written_outside = {node for node in self._order if node.op == "placeholder"} if outside else set()
        self._places: dict[fx.Node, list[int]] = {}

    def num_before(self, reader: fx.Node, source: fx.Node) -> int:
        """How often the memory of `source` is written before `reader`; with equal numbers, readers see equal values."""
        places = self._written_at(source)
        return bisect_left(places, self._order[reader]) - bisect_left(places, self._order[source] + 1)

    def any_after(self, source: fx.Node) -> bool:
        """Whether the memory of `source` is written after its definition."""
        return self._written_at(source)[-1:] > [self._order[source]]  # an empty list is the smaller one

    def any_from(self, reader: fx.Node, source: fx.Node) -> bool:
        """Whether the memory of `source` is written by `reader` itself or after it."""
        return self._written_since(self._order[reader], source)

    def any_behind(self, reader: fx.Node, source: fx.Node) -> bool:
        """Whether the memory of `source` is written after `reader` has run, in the graph or by other code."""
        return self._written_since(self._order[reader] + 1, source)

    def _written_since(self, index: int, source: fx.Node) -> bool:
        is_shared = not self._written_outside.isdisjoint(self._families.of(source))
        return is_shared or self._written_at(source)[-1:] >= [index]

    def first(self, readers: list[fx.Node]) -> fx.Node:
        """The reader that runs first."""
        return min(readers, key=self._order.__getitem__)

    def _written_at(self, source: fx.Node) -> list[int]:
        if source not in self._places:
            family = self._families.of(source)
            self._places[source] = [index for index, other in self._sources if other in family]
        return self._places[source]
