"""Matching: a pattern is a list of `MatchingNode`s, named, with their types, their inputs by name, and checks.

>>> pattern = [
...     MatchingNode("conv", types=(nn.Conv2d,)),
...     MatchingNode("bn", types=(nn.BatchNorm2d,), inputs=("conv",)),
... ]
>>> for match in SubgraphMatcher(pattern).find(graph_module): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

OpType = Any
Match = dict[str, fx.Node]
JointChecker = Callable[[Match, fx.GraphModule], bool]


@dataclass(frozen=True)
class MatchingNode:
    """One node of a pattern.

    `types`: module classes, functions, or method names; empty = anything. `inputs`: for each leading tensor input the name of
    the pattern node it must come from, None for any value. `unordered` accepts the inputs in any order (add, mul).
    `checker(node, module_or_None)` has the last word.
    """

    name: str
    types: tuple[OpType, ...] = ()
    inputs: tuple[str | None, ...] = ()
    checker: Callable[[fx.Node, nn.Module | None], bool] | None = None
    unordered: bool = False


@dataclass(frozen=True)
class SubgraphMatcher:
    """Finds the pattern, whose *last* node is the anchor; `joint_checkers` see all nodes of a candidate together."""

    nodes: Sequence[MatchingNode]
    joint_checkers: Sequence[JointChecker] = ()

    def find(self, graph_module: fx.GraphModule) -> Iterator[Match]:
        """Matches in graph order; the graph may be rewritten between two of them, gone nodes match nothing."""
        patterns = {pattern.name: pattern for pattern in self.nodes}
        anchor = self.nodes[-1]
        for node in list(graph_module.graph.nodes):
            if node._erased:
                continue
            for match in self._extend({}, anchor, node, patterns, graph_module):
                if len(match) == len(self.nodes) and all(check(match, graph_module) for check in self.joint_checkers):
                    yield match
                    break

    def _extend(
        self, match: Match, pattern: MatchingNode, node: fx.Node, patterns: dict[str, MatchingNode], root: fx.GraphModule
    ) -> Iterator[Match]:
        if pattern.name in match:
            if match[pattern.name] is node:
                yield match
            return
        if not is_type(node, pattern.types, root):
            return
        if pattern.checker is not None and not pattern.checker(node, module_of(node, root)):
            return
        sources = list(node.all_input_nodes)
        for order in _orders(sources, len(pattern.inputs), pattern.unordered):
            yield from self._extend_inputs({**match, pattern.name: node}, pattern.inputs, order, patterns, root)

    def _extend_inputs(
        self,
        match: Match,
        names: Sequence[str | None],
        sources: Sequence[fx.Node],
        patterns: dict[str, MatchingNode],
        root: fx.GraphModule,
    ) -> Iterator[Match]:
        if not names:
            yield match
            return
        if names[0] is None:
            yield from self._extend_inputs(match, names[1:], sources[1:], patterns, root)
            return
        for extended in self._extend(match, patterns[names[0]], sources[0], patterns, root):
            yield from self._extend_inputs(extended, names[1:], sources[1:], patterns, root)


def _orders(sources: list[fx.Node], wanted: int, unordered: bool) -> list[list[fx.Node]]:
    if len(sources) < wanted:
        return []
    return [sources, sources[::-1]] if unordered and len(sources) > 1 else [sources]


def module_of(node: fx.Node, root: fx.GraphModule) -> nn.Module | None:
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def is_type(node: fx.Node, types: tuple[OpType, ...], root: fx.GraphModule) -> bool:
    """Whether a node is one of `types`: a module class (exact or subclass), a function, a method's name."""
    if not types:
        return True
    if node.op == "call_module":
        classes = tuple(kind for kind in types if isinstance(kind, type))
        return isinstance(module_of(node, root), classes)
    if node.op == "call_function":
        return any(kind is node.target for kind in types)
    if node.op == "call_method":
        return node.target in [kind for kind in types if isinstance(kind, str)]
    return False
