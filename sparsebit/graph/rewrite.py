"""Rewriting: a match gives way to something else; uses are rewired and dead nodes swept.

>>> class DropDoubleRelu(ReplacePatternBase):
...     nodes = (
...         MatchingNode("first", types=(nn.ReLU,)),
...         MatchingNode("second", types=(nn.ReLU,), inputs=("first",)),
...     )
...     def replace(self, match, graph_module):
...         return {"second": match["first"]}
>>> DropDoubleRelu(until_stable=True).apply(graph_module)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx, nn

from sparsebit.graph.example import guard
from sparsebit.graph.patterns import JointChecker, Match, MatchingNode, SubgraphMatcher

_MAX_ROUNDS = 1000


class ReplacePatternBase:
    """Subclass, give `nodes` (and `joint_checkers`), write `replace`. Once per place, or `until_stable`."""

    nodes: Sequence[MatchingNode] = ()
    joint_checkers: Sequence[JointChecker] = ()

    def __init__(self, *, until_stable: bool = False) -> None:
        self.until_stable = until_stable

    def replace(self, match: Match, graph_module: fx.GraphModule) -> dict[str, fx.Node]:
        """Which node takes the place of which matched one; new nodes are made here. An empty dict leaves the graph alone
        (what was changed in the matched modules stays)."""
        raise NotImplementedError(f"{type(self).__name__} must define replace(match, graph_module)")

    def apply(self, graph_module: fx.GraphModule) -> int:
        """Rewrite `graph_module` in place; gives the number of places. A pattern that never settles is an error."""
        matcher = SubgraphMatcher(self.nodes, self.joint_checkers)
        total = 0
        for _ in range(_MAX_ROUNDS):
            changed = sum(self._apply_to(match, graph_module) for match in matcher.find(graph_module))
            total += changed
            if changed == 0 or not self.until_stable:
                break
        else:
            raise RuntimeError(f"{type(self).__name__} still matches after {_MAX_ROUNDS} rounds: it produces what it looks for")
        if total:
            sweep(graph_module)
        return total

    def _apply_to(self, match: Match, graph_module: fx.GraphModule) -> bool:
        replacements = self.replace(match, graph_module)
        for name, new in replacements.items():
            match[name].replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
        for name in reversed(list(match)):
            if name in replacements and not match[name].users:
                graph_module.graph.erase_node(match[name])
        return bool(replacements)


def sweep(graph_module: fx.GraphModule) -> None:
    """Erase nodes nobody reads (unused inputs stay: they are the caller's), then submodules nobody calls; recompile."""
    graph_module.graph.eliminate_dead_code(is_impure_node=_is_impure)
    graph_module.delete_all_unused_submodules()
    graph_module.graph.lint()
    graph_module.recompile()


def insert_module_after(graph_module: fx.GraphModule, node: fx.Node, name: str, module: nn.Module) -> fx.Node:
    """Call `module`, filed under `name`, on `node`'s value, right behind it. Uses are not rewired."""
    graph_module.add_submodule(name, module)
    with graph_module.graph.inserting_after(_last_of_block(node)):
        return graph_module.graph.call_module(name, (node,))


def _last_of_block(node: fx.Node) -> fx.Node:
    """Placeholders stay in front: what follows an input goes behind the last of them."""
    if node.op != "placeholder":
        return node
    while node.next.op == "placeholder":
        node = node.next
    return node


def _is_impure(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output") or node.target in (guard, operator.setitem):
        return True
    # In-place methods (`x.add_`) write through views that others may read.
    return node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__")
