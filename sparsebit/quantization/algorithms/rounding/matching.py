"""`Comparison`: how far a block's outputs are from the float model's, as a loss and as a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from sparsebit.execution.blocks.distances import Loss, directed_error, divergence, squared_error
from sparsebit.execution.blocks.engine import BatchValues, BlockData
from sparsebit.execution.blocks.find_blocks import Block
from sparsebit.execution.blocks.runner import Values
from sparsebit.execution.blocks.search import find_blocks
from sparsebit.execution.blocks.training import mean_distance
from sparsebit.graph.values.nested import tensors_of


@dataclass(frozen=True)
class Matching:
    """The settings of a comparison. `rank`: directions of the Fisher information besides its diagonal.

    The others are for the whole network. `is_renewed`: images are viewed anew in every step, and the share `patched`
    of them gets a rectangle of another image. `loss`: of the outputs, "kl" at a `temperature`. `features`: the weight
    of the errors at the outputs of the blocks inside.
    """

    rank: int = 0
    is_renewed: bool = False
    patched: float = 0.0
    loss: Loss = "squared"
    temperature: float = 1.0
    features: float = 0.0


class Comparison:
    """`weights`: of the error of each output element, and directions of it; None: all count alike.

    `before`: the error on the samples that are learned from, when this is made.
    """

    def __init__(self, data: BlockData, matching: Matching, weights: BatchValues | None) -> None:
        self.matching, self.weights = matching, weights
        self.num_outputs, self.nodes = len(data.block.outputs), _inner_outputs(data.block) if matching.features else []
        self.before = self.error(data)

    def error(self, part: BlockData) -> float:
        """The mean over the samples, of the block's outputs alone."""
        return mean_distance(part, self._of_outputs, None if self.weights is None else self.weights.part(part.batches))

    def distance(self, outputs: Values, targets: Values, extras: Values) -> Tensor:
        """The loss: that of the outputs, and of the `nodes` behind them, relative to the initial error.

        So one penalty weight fits every block.
        """
        count = self.num_outputs
        found = self._of_outputs(outputs[:count], targets[:count], extras)
        pairs = zip(outputs[count:], targets[count:], strict=True)
        inner = [squared_error((output,), (target,)) for output, target in pairs if has_float(target)]
        if inner:
            found = found + self.matching.features * torch.stack(inner).mean()
        return found / max(self.before, 1e-12)

    def _of_outputs(self, outputs: Values, targets: Values, extras: Values) -> Tensor:
        if self.matching.loss == "kl":
            return divergence(outputs, targets, self.matching.temperature)
        found = squared_error(outputs, targets, extras)
        return (found + directed_error(outputs, targets, extras)) / 2 if self.matching.rank else found


def has_float(value: Any) -> bool:
    """Whether there is something to compare: sizes cross the borders of blocks too."""
    return any(tensor.is_floating_point() for tensor in tensors_of(value))


def _inner_outputs(block: Block) -> list[fx.Node]:
    """The outputs of the blocks inside the network, as far as they are not the network's own."""
    graph_module: Any = block.nodes[0].graph.owning_module
    own = {*block.nodes} - {*block.outputs}
    found = dict.fromkeys(node for inner in find_blocks(graph_module) for node in inner.outputs)
    return [node for node in found if node in own]
