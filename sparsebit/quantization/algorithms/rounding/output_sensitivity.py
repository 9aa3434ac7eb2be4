"""`OutputSensitivity`: how strongly each element of a block's output affects the network's output.

These are weights for a reconstruction's error (`fisher`).
BRECQ (Li et al., ICLR 2021, section 3.2) weighs the error of a block's output by the diagonal of the Fisher
information. Here it is that of the squared error of the network's output `y`, the diagonal of `J^T J` with
`J = dy / d(block output)`, which needs no labels and does not vanish if a classifier is certain. It is estimated with
random vectors `r`: `E[(J^T r)^2] = diag(J^T J)`.
"""

from __future__ import annotations

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

    def __init__(self, memory_budget: int, seed: int) -> None:
        self.store = SharedData(device_bytes=memory_budget, host_bytes=memory_budget)
        self.seed, self.num_batches = seed, 0

    def prepare(self, run: FloatRun) -> None:
        """One forward and a few backwards of the float model for each batch."""
        self.num_batches = run.num_batches
        wanted = {node for block in run.blocks for node in block.outputs}
        generator = torch.Generator().manual_seed(self.seed)
        for index in range(run.num_batches):
            values, outputs = _forward(run, index, wanted)
            found = _squared_gradients(values, outputs, generator)
            for block in run.blocks:
                self.store.put((block.name, index), tuple(found[node] for node in block.outputs))

    def of(self, block: Block) -> BatchValues:
        """One weight for each element of each output, with a mean of 1; ones if the network does not read the output.

        The structure is that of the outputs: for a split, a tuple of tensors.
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


def _squared_gradients(
    values: dict[fx.Node, Any], outputs: list[Tensor], generator: torch.Generator
) -> dict[fx.Node, Any]:
    """The weights of each node's tensors, in the structure of the node's value."""
    tensors = list({id(t): t for t in tensors_of(list(values.values())) if t.is_floating_point()}.values())
    totals: dict[int, Tensor] = {}
    for draw in range(_DRAWS if outputs else 0):
        vectors = [torch.randn(output.shape, generator=generator).to(output) for output in outputs]
        found = torch.autograd.grad(outputs, tensors, vectors, retain_graph=draw + 1 < _DRAWS, allow_unused=True)
        for tensor, gradient in zip(tensors, found, strict=True):
            if gradient is not None:
                square = gradient.detach().float().square()
                totals[id(tensor)] = square + totals.get(id(tensor), 0.0)

    def weights(tensor: Tensor) -> Tensor:
        total = totals.get(id(tensor))
        if total is None or not bool(total.mean() > 0):
            return torch.ones_like(tensor.detach(), dtype=torch.float32)
        return total / total.mean()

    return {node: map_nested(Tensor, weights, value) for node, value in values.items()}
