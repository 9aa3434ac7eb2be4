"""`GraphFacts`: what is known about the nodes of a graph before any of them is planned."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

from torch import fx, nn

from sparsebit.graph.nodes.graph_module import CapturedGraph, module_of
from sparsebit.graph.nodes.value_kinds import python_values, static_values, tensor_inputs
from sparsebit.graph.ops.op_rows import OpKind, OpRow
from sparsebit.graph.ops.op_table import input_argument, row_of, tensor_arguments
from sparsebit.quantization.planning.divisors import divisor_only_ops
from sparsebit.quantization.planning.masks import hidden_values
from sparsebit.quantization.planning.sites import layer_name

_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})


@dataclass(frozen=True)
class GraphFacts:
    """A captured graph at a path of the model. `rows`: the known ops. `python`: nodes that are not tensors."""

    path: str
    root: CapturedGraph
    rows: dict[fx.Node, OpRow]
    python: set[fx.Node]

    def name_of(self, node: fx.Node) -> str:
        return layer_name(self.path, node)

    @cached_property
    def divisor_only(self) -> set[fx.Node]:
        """Ops whose results are only divided by."""
        return divisor_only_ops(self.root.graph, self.rows)

    @cached_property
    def hidden(self) -> set[fx.Node]:
        """Values with the huge numbers of a mask in them."""
        return hidden_values(self.root.graph, self.rows, self.python)

    def planned(self) -> list[fx.Node]:
        """The calls that may get quantizers.

        Ops on parameters alone compute a weight and get none, except layers with a weight of their own.
        """
        static = static_values(self.root.graph)
        calls = (node for node in self.root.graph.nodes if node.op.startswith("call_") and node not in self.python)
        return [node for node in calls if node not in static or self._is_layer(node)]

    def _is_layer(self, node: fx.Node) -> bool:
        return node.op == "call_module" and node in self.rows and self.rows[node].kind is OpKind.WEIGHTED

    def tensors(self, node: fx.Node) -> list[fx.Node]:
        """The nodes of all tensors that a node reads."""
        return [source for source in node.all_input_nodes if source not in self.python]

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose values an op quantizes as its inputs."""
        row = self.rows[node]
        values: list[Any] = []
        if row.kind is OpKind.MULTI:
            values = list(tensor_arguments(row, node.args, node.kwargs).values())
            values = [value for value in values if row.name not in _PRODUCTS or not self._is_stack(value)]
        elif (place := input_argument(row, node.args, node.kwargs, is_module=node.op == "call_module")) is not None:
            values = [node.kwargs[place] if isinstance(place, str) else node.args[place]]
        return list(dict.fromkeys(source for value in values for source in tensor_inputs(value, self.python)))

    def _is_stack(self, value: Any) -> bool:
        """Whether an operand is a parameter of stacked matrices: a weight, with its own quantizer."""
        while isinstance(value, fx.Node) and value.op != "get_attr":
            row = self.rows.get(value)
            if row is None or row.kind is not OpKind.TRANSPARENT or not value.all_input_nodes:
                return False
            value = value.all_input_nodes[0]
        found = attrgetter(str(value.target))(self.root) if isinstance(value, fx.Node) else None
        return isinstance(found, nn.Parameter) and sum(size > 1 for size in found.shape) > 2


def graph_facts(path: str, root: CapturedGraph, opaque: Container[str]) -> GraphFacts:
    """`opaque`: modules that are not traced, whose layers are planned one by one."""
    python = python_values(root.graph)

    def is_entered(node: fx.Node) -> bool:
        module = module_of(node, root)
        return module is not None and layer_name(path, node) in opaque and bool(list(module.children()))

    known = (node for node in root.graph.nodes if node not in python and not is_entered(node))
    rows = {node: row for node in known if (row := row_of(node, root)) is not None}
    return GraphFacts(path, root, rows, python)
