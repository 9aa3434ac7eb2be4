"""`BlockRunner`: runs one block on given input values, any number of times, without changing them."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from sparsebit.execution.blocks.find_blocks import Block
from sparsebit.graph.values.nested import map_nested, tensors_of

Values = tuple[Any, ...]


class BlockRunner:
    """`runner(inputs)`: the values of `block.outputs`. `written`: the values that nodes of the block write into."""

    def __init__(self, interpreter: fx.Interpreter, block: Block, written: Collection[fx.Node]) -> None:
        self.block, self.written = block, written
        self._interpreter = interpreter
        self._dying = _last_reads(block)

    def __call__(self, inputs: Values, *, in_place: Collection[fx.Node] = (), writes_buffers: bool = False) -> Values:
        """Inputs that the block writes into are copied, but not those `in_place`; buffers unless `writes_buffers`."""
        values = dict(zip(self.block.inputs, inputs, strict=True))
        if self.block.written:
            values.update(_copied({node: values[node] for node in self.block.written if node not in in_place}))

        def value_of(node: fx.Node) -> Any:
            if node.op != "get_attr":
                return values[node]
            if node in self.written and not writes_buffers:
                if node not in values:
                    values[node] = map_nested(Tensor, torch.clone, self._interpreter.fetch_attr(str(node.target)))
                return values[node]
            return self._interpreter.fetch_attr(str(node.target))  # read at every run: a visit may replace the tensor

        for node in self.block.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
            values[node] = getattr(self._interpreter, node.op)(node.target, args, kwargs)
            for gone in self._dying[node]:
                del values[gone]
        return tuple(values[node] for node in self.block.outputs)


def _last_reads(block: Block) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that can be dropped after it: neither the block's rest nor later nodes read them."""
    dying: dict[fx.Node, list[fx.Node]] = {node: [] for node in block.nodes}
    seen = set(block.outputs)
    for node in reversed(block.nodes):
        for value in (node, *node.all_input_nodes):
            if value not in seen and value.op != "get_attr":
                seen.add(value)
                dying[node].append(value)
    return dying


def _copied(values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    """Copies of values; those that share memory share it in the copies too, unless gradients are needed."""
    if any(tensor.requires_grad for tensor in tensors_of(list(values.values()))):
        return {node: map_nested(Tensor, torch.clone, value) for node, value in values.items()}
    return copy.deepcopy(values, {id(node): node for node in values})
