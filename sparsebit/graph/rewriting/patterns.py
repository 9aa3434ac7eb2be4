"""Matching: a pattern is a list of `MatchingNode`s, named, with their types, their inputs by name, and checks.

>>> pattern = [
...     MatchingNode("conv", types=(nn.Conv2d,)),
...     MatchingNode("relu", types=(nn.ReLU, "relu"), inputs=("conv",)),
... ]
>>> graph_module = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()))
>>> [match["relu"].target for match in SubgraphMatcher(pattern).find(graph_module)]
['1']
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

from torch import fx, nn

from sparsebit.graph.nodes.graph_module import module_of

OpType = Any
Match = dict[str, fx.Node]
JointChecker = Callable[[Match, fx.GraphModule], bool]


@dataclass(frozen=True)
class MatchingNode:
    """One node of a pattern.

    `types`: module classes, functions, or method names; empty = anything. `inputs`: for each leading input that is a
    node, the name of the pattern node it must be, None for any. `unordered` accepts the inputs in any order (add, mul).
    `checker(node, module_or_None)` has the last word.
    """

    name: str
    types: tuple[OpType, ...] = ()
    inputs: tuple[str | None, ...] = ()
    checker: Callable[[fx.Node, nn.Module | None], bool] | None = None
    unordered: bool = False


@dataclass(frozen=True)
class SubgraphMatcher:
    """Finds a pattern of nodes in a graph; all of them feed the *last* one.

    `joint_checkers` see all nodes of a candidate together.
    """

    nodes: Sequence[MatchingNode]
    joint_checkers: Sequence[JointChecker] = ()

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a pattern needs nodes, each with a name of its own; given: {names}")
        feeding, inputs = {names[-1]}, {node.name: node.inputs for node in self.nodes}
        for _ in names:
            feeding |= {name for known in feeding & inputs.keys() for name in inputs[known] if name is not None}
        if feeding != set(names):
            raise ValueError(
                f"in the pattern {names}, {sorted(feeding ^ set(names))} are not defined or do not feed {names[-1]!r}; "
                "name every input after a node of the pattern, and put the node that the others feed last"
            )

    def find(self, graph_module: fx.GraphModule) -> Iterator[Match]:
        """Matches in graph order; the graph may be rewritten between two of them; erased nodes do not match."""
        for node in list(graph_module.graph.nodes):
            candidates = () if node._erased else self._extend({}, self.nodes[-1], node, graph_module)
            for match in candidates:
                if all(check(match, graph_module) for check in self.joint_checkers):
                    yield match
                    break

    def _extend(self, match: Match, pattern: MatchingNode, node: fx.Node, root: fx.GraphModule) -> Iterator[Match]:
        """The matches with `node` as that node of the pattern."""
        if pattern.name in match:
            if match[pattern.name] is node:
                yield match
            return
        has_type, check = is_type(node, pattern.types, root), pattern.checker
        if not has_type or (check is not None and not check(node, module_of(node, root))):
            return
        patterns = {pattern.name: pattern for pattern in self.nodes}
        for order in _orders(_sources(node), len(pattern.inputs), pattern.unordered):
            matches = [{**match, pattern.name: node}]
            for name, source in zip(pattern.inputs, order, strict=False):
                if name is not None:
                    matches = [more for found in matches for more in self._extend(found, patterns[name], source, root)]
            yield from matches


def _sources(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, in order, with repetitions (`x + x`: twice)."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _orders(sources: list[fx.Node], wanted: int, unordered: bool) -> Iterator[Sequence[fx.Node]]:
    if unordered:
        yield from itertools.permutations(sources, wanted)
    elif len(sources) >= wanted:
        yield sources


def only_reader(node: fx.Node, root: fx.GraphModule) -> nn.Module | None:
    """The module that alone reads `node`, as its first argument, and is called nowhere else."""
    if len(node.users) != 1:
        return None
    (reader,) = node.users
    module = module_of(reader, root)
    if module is None or reader.args[:1] != (node,):
        return None
    calls = [other for other in root.graph.nodes if other.op == "call_module" and other.target == reader.target]
    return module if len(calls) == 1 else None


M = TypeVar("M", bound=nn.Module)


def is_itself(module: nn.Module | None, kind: type[M]) -> TypeGuard[M]:
    """Whether the module's real type is `kind`. `isinstance` of a wrapped layer is that of the layer inside it."""
    return issubclass(type(module), kind)


def is_type(node: fx.Node, types: tuple[OpType, ...], root: fx.GraphModule) -> bool:
    """Whether a node is one of `types`: a module class (exact or subclass), a function, a method's name."""
    if not types:
        return True
    if node.op == "call_module":
        classes = tuple(kind for kind in types if isinstance(kind, type))
        return issubclass(type(module_of(node, root)), classes)  # a wrapped layer answers `isinstance` as its op
    if node.op == "call_function":
        return any(kind is node.target for kind in types)
    return node.op == "call_method" and node.target in [kind for kind in types if isinstance(kind, str)]
