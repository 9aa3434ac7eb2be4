"""`GraphVisitor`: runs a graph node by node over many batches, with every value kept only until its last reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from sparsebit.execution.value_store import SharedData
from sparsebit.graph.liveness import last_uses

Visit = Callable[[fx.Node, Callable[[], Iterator[Any]]], None]


class GraphVisitor:
    """Layer by layer instead of batch by batch.

    `visit(node, run)` is called before the node's values are made; `run()` runs the node on each batch in turn and may be
    used several times (to observe, say) before the final values are computed and stored.
    """

    def __init__(self, graph_module: fx.GraphModule, store: SharedData) -> None:
        self.interpreter = fx.Interpreter(graph_module, garbage_collect_values=False)
        self.graph, self.store = graph_module.graph, store

    @torch.no_grad()
    def run(self, num_batches: int, inputs_of: Callable[[int], dict[str, Any]], visit: Visit) -> None:
        """`inputs_of(i)`: the graph's inputs of batch i by name; a missing one takes its default."""
        dying = last_uses(self.graph)
        for node in self.graph.nodes:
            if node.op == "output":
                break
            if node.op == "placeholder":
                for index in range(num_batches):
                    default = node.args[0] if node.args else None
                    self.store.put((node, index), inputs_of(index).get(str(node.target), default))
            else:
                visit(node, lambda node=node: (self._run_node(node, index) for index in range(num_batches)))
                for index in range(num_batches):
                    self.store.put((node, index), self._run_node(node, index))
            for gone in dying[node]:
                for index in range(num_batches):
                    self.store.drop((gone, index))
        self.store.clear()

    def _run_node(self, node: fx.Node, index: int) -> Any:
        args = fx.map_arg(node.args, lambda source: self.store.get((source, index)))
        kwargs = fx.map_arg(node.kwargs, lambda source: self.store.get((source, index)))
        return getattr(self.interpreter, node.op)(node.target, args, kwargs)
