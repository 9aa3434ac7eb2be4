"""Values that an ONNX graph computes from constants alone become constants: standardized weights, learned scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sparsebit.deploy.onnx_graph.ir_values import producer
from sparsebit.deploy.onnx_graph.packages import ir


def fold_constants(model: ir.Model, values: Iterable[ir.Value | None], *, stop: Callable[[ir.Node], bool]) -> None:
    """Fold those of `values`, of any size, that depend on no input of the model and on no node in `stop`."""
    wanted: set[ir.Node] = set()
    for value in values:
        node = producer(value) if value is not None and value.const_value is None else None
        wanted |= _constant_ancestors(node, stop) if node is not None else set()
    if wanted:
        import onnxscript.optimizer

        onnxscript.optimizer.fold_constants(
            model,
            onnx_shape_inference=False,
            input_size_limit=1 << 40,
            output_size_limit=1 << 40,
            should_fold=lambda node: True if node in wanted else False,  # noqa: SIM210 (None would mean: as usual)
        )


def _constant_ancestors(node: ir.Node, stop: Callable[[ir.Node], bool]) -> set[ir.Node]:
    """All nodes that the node's value is computed from; none if one of them reads an input of the model."""
    found: set[ir.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current in found:
            continue
        if stop(current):
            return set()
        found.add(current)
        makers = [producer(value) for value in current.inputs if value is not None and value.const_value is None]
        if None in makers:
            return set()
        stack += filter(None, makers)
    return found
