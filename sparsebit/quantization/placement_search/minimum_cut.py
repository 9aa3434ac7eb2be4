"""The cheapest split of a graph in two, exactly (Dinic's algorithm; E. A. Dinic, 1970)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

_SMALLEST = 1e-12


def cheapest_split(
    first: Sequence[float], second: Sequence[float], edges: Iterable[tuple[int, int, float]], *, both_ways: bool = True
) -> tuple[bool, ...]:
    """For each node whether it is on the first side, so that the sum of all costs is the least.

    `first[i]`, `second[i]`: the cost of node `i` on each side; infinity forbids it. `edges`: `(i, j, cost)` is paid if
    `i` and `j` are on different sides; not `both_ways`: only if `i` is on the first side and `j` is not. Among equally
    cheap splits, the one with the fewest nodes on the first side is returned.

    >>> cheapest_split([1.0, 5.0, 1.0], [3.0, 1.0, 3.0], [(0, 1, 0.5), (1, 2, 0.5)])
    (True, False, True)
    >>> cheapest_split([1.0, 5.0, 1.0], [3.0, 4.0, 3.0], [(0, 1, 2.0), (1, 2, 2.0)])
    (True, True, True)
    """
    # A cut separates the first side, with the source, from the second, with the sink. A node on the first side has its
    # edge to the sink cut, so that edge carries its cost there; likewise for the second side.
    flow = _Flow(len(first) + 2)
    source, sink = len(first), len(first) + 1
    for node, (on_first, on_second) in enumerate(zip(first, second, strict=True)):
        flow.add(source, node, on_second)
        flow.add(node, sink, on_first)
    for left, right, cost in edges:
        flow.add(left, right, cost, cost if both_ways else 0.0)
    flow.run(source, sink)
    reached = flow.levels(source)
    return tuple(reached[node] >= 0 for node in range(len(first)))


class _Flow:
    def __init__(self, size: int) -> None:
        self.ends: list[int] = []
        self.room: list[float] = []
        self.at: list[list[int]] = [[] for _ in range(size)]

    def add(self, left: int, right: int, room: float, back: float = 0.0) -> None:
        for start, end, capacity in ((left, right, room), (right, left, back)):
            self.at[start].append(len(self.ends))
            self.ends.append(end)
            self.room.append(capacity)

    def levels(self, source: int) -> list[int]:
        """The distance of each node from the source through edges with room; -1: not reached."""
        found = [-1] * len(self.at)
        found[source] = 0
        queue = deque([source])
        while queue:
            node = queue.popleft()
            for edge in self.at[node]:
                if self.room[edge] > _SMALLEST and found[self.ends[edge]] < 0:
                    found[self.ends[edge]] = found[node] + 1
                    queue.append(self.ends[edge])
        return found

    def run(self, source: int, sink: int) -> None:
        while (levels := self.levels(source))[sink] >= 0:
            tried = [0] * len(self.at)
            while self._push(source, sink, levels, tried):
                pass

    def _push(self, source: int, sink: int, levels: list[int], tried: list[int]) -> bool:
        """Fill one path of the level graph. No recursion: paths are as long as the network is deep."""
        path: list[int] = []
        node = source
        while node != sink:
            edge = self._next(node, levels, tried)
            if edge >= 0:
                path.append(edge)
                node = self.ends[edge]
            elif path:
                node = self.ends[path.pop() ^ 1]
                tried[node] += 1
            else:
                return False
        amount = min(self.room[edge] for edge in path)
        for edge in path:
            self.room[edge] -= amount
            self.room[edge ^ 1] += amount
        return True

    def _next(self, node: int, levels: list[int], tried: list[int]) -> int:
        """The next edge with room that leads one level further; -1 if there is none left."""
        while tried[node] < len(self.at[node]):
            edge = self.at[node][tried[node]]
            if self.room[edge] > _SMALLEST and levels[self.ends[edge]] == levels[node] + 1:
                return edge
            tried[node] += 1
        return -1
