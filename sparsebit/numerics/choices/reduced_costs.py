"""Lower bounds of the cost of each option of a choice program, from the reduced costs of the relaxed program.

Every choice costs `least + sum_k d[k] x[k] + sum_kl d[kl] z[kl]` or more, with the optimum `least` of the relaxed
program and the reduced costs `d >= 0` of options and of pairs of options. With pairs, the cost of an option may be
on its pairs only (`d[k] = 0`, all `d[kl] > 0`), so that `d[k]` is a useless bound. The least sum with `x[k] = 1` is
a better one. If pairs form trees, as an activation and the weights that read it do, two passes over them find it
(the min-sum algorithm; Wainwright and Jordan, "Graphical Models", 2008, section 2.5). Pairs that close a cycle are left
out of the sum: it stays a lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Numbers = Mapping[str, int]  # of each group


@dataclass(frozen=True)
class _Edge:
    """A pair, seen from one of its groups: the variable of option `k` here and `l` there is `start + k * a + l * b`."""

    other: str
    start: int
    own_step: int
    other_step: int

    def at(self, own: int, other: int) -> int:
        return self.start + own * self.own_step + other * self.other_step


def option_bounds(
    num_options: Numbers, first: Numbers, pairs: Mapping[tuple[str, str], int], reduced: Sequence[float]
) -> list[float]:
    """For each option, a lower bound of the cost beyond `least` of every choice with it: the least sum over its tree.

    `num_options`: of each group; `first`: its first variable. `pairs[(a, b)]`: the first variable of the pair.

    >>> option_bounds({"a": 2, "b": 1}, {"a": 0, "b": 2}, {("a", "b"): 3}, [0.0, 0.0, 0.0, 0.0, 5.0])
    [0.0, 5.0, 0.0]
    """
    extra = list(reduced[: sum(num_options.values())])
    edges: dict[str, list[_Edge]] = {group: [] for group in num_options}
    for (a, b), start in pairs.items():
        edges[a].append(_Edge(b, start, num_options[b], 1))
        edges[b].append(_Edge(a, start, 1, num_options[b]))
    seen: set[str] = set()
    for root in num_options:
        if root not in seen and edges[root]:
            _bound_tree(_tree(root, edges, seen), num_options, first, reduced, extra)
    return extra


_Tree = list[tuple[str, _Edge | None]]  # each group after its parent, with the edge to it


def _tree(root: str, edges: Mapping[str, list[_Edge]], seen: set[str]) -> _Tree:
    """The groups that pairs join to `root`, parents first."""
    order: _Tree = [(root, None)]
    seen.add(root)
    for group, _ in order:  # the list grows while it is read
        for edge in edges[group]:
            if edge.other not in seen:
                seen.add(edge.other)
                back = next(e for e in edges[edge.other] if e.start == edge.start)
                order.append((edge.other, back))
    return order


def _bound_tree(
    order: _Tree, num_options: Numbers, first: Numbers, reduced: Sequence[float], extra: list[float]
) -> None:
    """Write the bounds of one tree's options to `extra`."""
    sums = {group: list(reduced[first[group] : first[group] + num_options[group]]) for group, _ in order}
    sent: dict[str, list[float]] = {}  # by each group to its parent
    for group, edge in reversed(order):
        if edge is not None:
            options = range(num_options[group])
            sent[group] = [
                min(sums[group][k] + reduced[edge.at(k, j)] for k in options) for j in range(num_options[edge.other])
            ]
            sums[edge.other] = [a + b for a, b in zip(sums[edge.other], sent[group], strict=True)]
    for group, edge in order:  # a parent's sums are those of the whole tree by now
        if edge is not None:
            rest = [a - b for a, b in zip(sums[edge.other], sent[group], strict=True)]
            sums[group] = [
                value + min(reduced[edge.at(k, j)] + cost for j, cost in enumerate(rest))
                for k, value in enumerate(sums[group])
            ]
        extra[first[group] : first[group] + num_options[group]] = sums[group]
