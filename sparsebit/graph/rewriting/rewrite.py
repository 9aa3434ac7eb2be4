"""Rewriting: a matched pattern is replaced, its uses are rewired and dead nodes are removed.

>>> class DropDoubleRelu(ReplacePatternBase):
...     nodes = (
...         MatchingNode("first", types=(nn.ReLU,)),
...         MatchingNode("second", types=(nn.ReLU,), inputs=("first",)),
...     )
...     def replace(self, match, graph_module):
...         return {"second": match["first"]}
>>> graph_module = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU()))
>>> DropDoubleRelu(until_stable=True).apply(graph_module)
2
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx, nn

from sparsebit.first_sparsebit import refuse_former_methods
from sparsebit.graph.nodes.aliasing import is_users_function, written_by
from sparsebit.graph.nodes.example import guard
from sparsebit.graph.nodes.graph_module import CapturedGraph, module_of
from sparsebit.graph.nodes.random_ops import may_draw, module_may_draw
from sparsebit.graph.rewriting.patterns import JointChecker, Match, MatchingNode, SubgraphMatcher


class ReplacePatternBase:
    """Base of graph passes that replace a pattern of nodes.

    A subclass sets `nodes` (and `joint_checkers`) and defines `replace`. It is called once for each place of the
    graph, or with `until_stable` until nothing changes.
    """

    nodes: Sequence[MatchingNode] = ()
    joint_checkers: Sequence[JointChecker] = ()

    def __init__(self, *, until_stable: bool = False) -> None:
        self.until_stable = until_stable

    def __init_subclass__(cls) -> None:
        refuse_former_methods(cls, "make_nodes", "make_joint_checkers", "make_matching_strategy", "get_new_graph")

    def replace(self, match: Match, graph_module: fx.GraphModule) -> dict[str, fx.Node]:
        """The replacement of each replaced node, by pattern name; new nodes are made here, and may read the matched
        ones.

        An empty dict leaves the graph alone (what was changed in the matched modules stays).
        """
        raise NotImplementedError(f"{type(self).__name__} must define replace(match, graph_module)")

    def apply(self, graph_module: fx.GraphModule) -> int:
        """Rewrite `graph_module` in place; returns the number of places. A pass that matches forever is an error."""
        matcher = SubgraphMatcher(self.nodes, self.joint_checkers)
        limit = 1000 + 10 * len(graph_module.graph.nodes)
        total = 0
        while True:
            before = total
            for match in matcher.find(graph_module):
                total += self._apply_to(match, graph_module)
                if total > limit:
                    raise RuntimeError(
                        f"{type(self).__name__} still matches after {limit} rewrites: it produces what it looks for; "
                        "apply it once (until_stable=False), or let a checker refuse what it has made"
                    )
            if total == before:
                return total
            sweep(graph_module)
            if not self.until_stable:
                return total

    def _apply_to(self, match: Match, graph_module: fx.GraphModule) -> bool:
        old = set(graph_module.graph.nodes)
        replacements = {name: new for name, new in self.replace(match, graph_module).items() if new is not match[name]}
        for name, new in replacements.items():
            for user in [user for user in match[name].users if user in old and user is not new]:
                user.replace_input_with(match[name], new)
        for name in replacements:
            if not match[name].users:
                graph_module.graph.erase_node(match[name])
        return bool(replacements)


def sweep(graph_module: fx.GraphModule) -> None:
    """Erase nodes that are not read and have no side effect, then submodules that are not called, and recompile.

    Unused inputs stay, so that the graph's signature does not change.
    """

    def is_impure(node: fx.Node) -> bool:
        is_fixed = node.op in ("placeholder", "output") or node.target is guard
        return is_fixed or _has_effects(node, graph_module) or bool(written_by(node, graph_module))

    graph_module.graph.eliminate_dead_code(is_impure_node=is_impure)
    graph_module.delete_all_unused_submodules()
    if isinstance(graph_module, CapturedGraph):
        graph_module.release_unread()
    graph_module.graph.lint()
    graph_module.recompile()


def _has_effects(node: fx.Node, root: fx.GraphModule) -> bool:
    """Whether a call has side effects: draws random numbers, runs hooks or a user's code, counts batches."""
    module = module_of(node, root)
    if module is None:
        return is_users_function(node) or (node.op in ("call_function", "call_method") and may_draw(node.target))
    is_watched = bool(module._forward_hooks or module._forward_pre_hooks)
    is_torchs = type(module).__module__.startswith(("torch.", "sparsebit."))
    return is_watched or not is_torchs or any(True for _ in module.buffers()) or module_may_draw(module)


def insert_module_after(graph_module: fx.GraphModule, node: fx.Node, name: str, module: nn.Module) -> fx.Node:
    """Call `module`, filed under `name`, on `node`'s value, right after it. Uses are not rewired."""
    graph_module.add_submodule(name, module)
    last = node
    while last.op == "placeholder" and last.next.op == "placeholder":  # placeholders stay first
        last = last.next
    with graph_module.graph.inserting_after(last):
        return graph_module.graph.call_module(name, (node,))


def insert_module_before(
    graph_module: fx.GraphModule, reader: fx.Node, source: fx.Node, name: str, module: nn.Module
) -> fx.Node:
    """Call `module`, filed under `name`, on `source`'s value, right before `reader`. Uses are not rewired."""
    graph_module.add_submodule(name, module)
    with graph_module.graph.inserting_before(reader):
        return graph_module.graph.call_module(name, (source,))
