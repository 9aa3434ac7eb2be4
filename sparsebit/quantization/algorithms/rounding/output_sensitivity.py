"""`OutputSensitivity`: how strongly each element of a block's output affects the network's output.

These are weights for a reconstruction's error (`fisher`).
BRECQ (Li et al., ICLR 2021, section 3.2) weighs the error of a block's output by the diagonal of the Fisher
information. Here it is that of the squared error of the network's output `y`, the diagonal of `J^T J` with
`J = dy / d(block output)`, which needs no labels and does not vanish if a classifier is certain. It is estimated with
random vectors `r`: `E[(J^T r)^2] = diag(J^T J)`.

FIMA-Q (Wu et al., CVPR 2025, section 3.3) adds a matrix of low rank to the diagonal. Here its rows are some of the same
`J^T r`: the second part of the error is the mean of `(r^T J d)^2` for an error `d` of the block's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from sparsebit.execution.blocks.engine import BatchValues
from sparsebit.execution.blocks.find_blocks import Block, whole_graph
from sparsebit.execution.blocks.value_store import SharedData
from sparsebit.graph.values.nested import map_nested, tensors_of
from sparsebit.quantization.calibrating.block_visits import FloatRun

_DRAWS = 2


class OutputSensitivity:
    """The weights of every block's outputs, for each batch, in a bounded store."""

    def __init__(self, memory_budget: int, seed: int, rank: int = 0) -> None:
        self.store = SharedData(device_bytes=memory_budget, host_bytes=memory_budget)
        self.seed, self.rank, self.num_batches = seed, rank, 0

    def prepare(self, run: FloatRun) -> None:
        """One forward and a few backwards of the float model for each batch."""
        self.num_batches = run.num_batches
        wanted = {node for block in run.blocks for node in block.outputs}
        generator = torch.Generator().manual_seed(self.seed)
        for index in range(run.num_batches):
            values, outputs = _forward(run, index, wanted)
            found = _sensitivity(values, outputs, generator, self.rank)
            for block in run.blocks:
                rows = zip(*(found[node] for node in block.outputs), strict=True)
                self.store.put((block.name, index), tuple(value for row in rows for value in row))

    def of(self, block: Block) -> BatchValues:
        """One weight for each element of each output, with a mean of 1; ones if the network does not read the output.

        The structure is that of the outputs: for a split, a tuple of tensors. After the weights come `rank` gradients,
        each for all outputs.
        """
        return BatchValues(self.num_batches, lambda index: self.store.get((block.name, index)))

    def drop(self, block: Block) -> None:
        for index in range(self.num_batches):
            self.store.drop((block.name, index))


def _forward(run: FloatRun, index: int, wanted: set[fx.Node]) -> tuple[dict[fx.Node, Any], list[Tensor]]:
    """The values of the wanted nodes as parts of one autograd graph, and the network's float outputs."""
    kept: dict[fx.Node, Any] = {}

    def followed(x: Tensor) -> Tensor:
        return x.detach().requires_grad_() if x.is_floating_point() and not x.requires_grad else x

    class Keeping(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if n in wanted:
                value = kept[n] = map_nested(Tensor, followed, value)
            return value

    given = run.inputs_of(index)
    (network,) = whole_graph(run.graph_module)  # ops between blocks compute in float too
    placeholders = run.graph_module.graph.find_nodes(op="placeholder")
    arguments = [given.get(str(node.target), node.args[0] if node.args else None) for node in placeholders]
    with run.as_float(network), torch.inference_mode(False), torch.enable_grad():
        output = Keeping(run.graph_module).run(*arguments)
    return kept, [tensor for tensor in tensors_of(output) if tensor.is_floating_point() and tensor.requires_grad]


def _sensitivity(
    values: dict[fx.Node, Any], outputs: list[Tensor], generator: torch.Generator, rank: int
) -> dict[fx.Node, list[Any]]:
    """For each node, in the structure of its value: the weights of its tensors, then `rank` gradients."""
    tensors = list({id(t): t for t in tensors_of(list(values.values())) if t.is_floating_point()}.values())
    totals: dict[int, Tensor] = {}
    rows: list[dict[int, Tensor]] = [{} for _ in range(rank)]
    draws = max(_DRAWS, rank)
    for draw in range(draws if outputs else 0):
        vectors = [torch.randn(output.shape, generator=generator).to(output) for output in outputs]
        found = torch.autograd.grad(outputs, tensors, vectors, retain_graph=draw + 1 < draws, allow_unused=True)
        for tensor, gradient in zip(tensors, found, strict=True):
            if gradient is not None:
                gradient = gradient.detach().float()
                totals[id(tensor)] = gradient.square() + totals.get(id(tensor), 0.0)
                if draw < rank:
                    rows[draw][id(tensor)] = gradient

    def weights(tensor: Tensor) -> Tensor:
        total = totals.get(id(tensor))
        if total is None or not bool(total.mean() > 0):
            return torch.ones_like(tensor.detach(), dtype=torch.float32)
        return total / total.mean()

    def gradients(row: dict[int, Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda tensor: row.get(id(tensor), torch.zeros_like(tensor.detach(), dtype=torch.float32))

    parts = [weights, *map(gradients, rows)]
    return {node: [map_nested(Tensor, part, value) for part in parts] for node, value in values.items()}
