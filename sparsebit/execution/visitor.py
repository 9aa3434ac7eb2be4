"""`GraphVisitor`: runs a graph node by node over many batches, with every value kept only until its last reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from sparsebit.execution.value_store import SharedData
from sparsebit.graph.aliasing import overwritten, written_later
from sparsebit.graph.liveness import last_uses
from sparsebit.graph.nested import map_nested

Visit = Callable[[fx.Node, Callable[[], Iterator[Any]]], None]


class GraphVisitor:
    """Layer by layer instead of batch by batch.

    `visit(node, run)` is called before the node's values are made; `run()` runs the node on each batch in turn and may
    be used several times (to observe, say) before the final values are computed and stored.
    """

    def __init__(self, graph_module: fx.GraphModule, store: SharedData) -> None:
        self.interpreter = fx.Interpreter(graph_module, garbage_collect_values=False)
        self.graph_module, self.graph, self.store = graph_module, graph_module.graph, store
        # Values that some node overwrites: they share memory, which no store can keep.
        self._held: dict[tuple[fx.Node, int], Any] = {}
        self._written = written_later(graph_module)

    @torch.no_grad()
    def run(self, num_batches: int, inputs_of: Callable[[int], dict[str, Any]], visit: Visit) -> None:
        """`inputs_of(i)`: the graph's inputs of batch i by name; a missing one takes its default."""
        dying = last_uses(self.graph)
        try:
            for node in self.graph.nodes:
                if node.op in ("output", "get_attr"):  # parameters and buffers are read where they live
                    continue
                if node.op != "placeholder":
                    visit(node, self._runner(node, num_batches))
                for index in range(num_batches):
                    self._put(node, index, self._value(node, index, inputs_of))
                for gone in dying[node]:
                    for index in range(num_batches):
                        self._drop(gone, index)
        finally:
            self.store.clear()
            self._held.clear()

    def _runner(self, node: fx.Node, num_batches: int) -> Callable[[], Iterator[Any]]:
        # A node that overwrites its input must not do so once per visit.
        on_copies = overwritten(node, self.graph_module) is not None
        return lambda: (self._run_node(node, index, on_copies=on_copies) for index in range(num_batches))

    def _value(self, node: fx.Node, index: int, inputs_of: Callable[[int], dict[str, Any]]) -> Any:
        if node.op != "placeholder":
            return self._run_node(node, index)
        default = node.args[0] if node.args else None
        return inputs_of(index).get(str(node.target), default)

    def _run_node(self, node: fx.Node, index: int, *, on_copies: bool = False) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self._get(source, index))
        if on_copies:
            args, kwargs = map_nested(torch.Tensor, torch.clone, (tuple(args), dict(kwargs)))
        return getattr(self.interpreter, node.op)(node.target, args, kwargs)

    def _get(self, node: fx.Node, index: int) -> Any:
        if node.op == "get_attr":
            return self.interpreter.fetch_attr(str(node.target))
        return self._held[node, index] if node in self._written else self.store.get((node, index))

    def _put(self, node: fx.Node, index: int, value: Any) -> None:
        if node in self._written:
            # An input is the caller's: not ours to write into.
            is_input = node.op == "placeholder"
            self._held[node, index] = map_nested(torch.Tensor, torch.clone, value) if is_input else value
        else:
            self.store.put((node, index), value)

    def _drop(self, node: fx.Node, index: int) -> None:
        self._held.pop((node, index), None)
        self.store.drop((node, index))
