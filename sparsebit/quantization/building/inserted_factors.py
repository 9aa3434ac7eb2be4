"""Per-channel multiplications that smoothing inserts into a built graph, and their records.

A saved model contains the records, so that loading can insert the same modules before it loads their tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.errors import CheckpointError
from sparsebit.graph.rewriting.rewrite import insert_module_before


class ChannelFactor(nn.Module):
    """Multiplies its input by `factor`, which is broadcast over the leading axes."""

    factor: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor.to(x.dtype)  # a model in half precision stays in it


@dataclass(frozen=True)
class InsertedFactor:
    """One multiplication: its path in the graph, the node that it reads, its readers, and the factor's shape."""

    name: str
    source: str
    readers: tuple[str, ...]
    shape: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> InsertedFactor:
        try:
            return cls(record["name"], record["source"], tuple(record["readers"]), tuple(record["shape"]))
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"a record of an inserted factor is damaged ({error!r}); save it again") from None


def insert(root: fx.GraphModule, factors: Iterable[InsertedFactor]) -> None:
    """Insert the multiplications into the graph, in place, each with a factor of one."""
    for record in factors:
        nodes = {node.name: node for node in root.graph.nodes}
        missing = [name for name in (record.source, *record.readers) if name not in nodes]
        if missing:
            names = ", ".join(missing)
            raise CheckpointError(f"the factor {record.name} was between nodes that this graph does not have: {names}")
        source, readers = nodes[record.source], [nodes[name] for name in record.readers]
        first = next(node for node in root.graph.nodes if node in readers)
        device = next((parameter.device for parameter in root.parameters()), torch.device("cpu"))
        module = ChannelFactor(record.shape).to(device).train(root.training)
        new = insert_module_before(root, first, source, record.name, module)
        for reader in readers:
            reader.replace_input_with(source, new)
    root.graph.lint()
    root.recompile()


def remove(root: fx.GraphModule, factors: Iterable[InsertedFactor]) -> None:
    """Remove the multiplications from the graph, in place."""
    for record in factors:
        for node in root.graph.find_nodes(op="call_module", target=record.name):
            node.replace_all_uses_with(node.all_input_nodes[0])
            root.graph.erase_node(node)
        root.delete_submodule(record.name)
    root.graph.lint()
    root.recompile()
