"""`LearnedBlock`: the layers of one block with learned codes and ranges, and the state of their optimizer.

All that changes is a flat dictionary of tensors (`state`, `take`), so that a store can keep the blocks that do not
compute now, and a run can continue. The weights of the layers themselves are freed: their values follow from that
state. Norms, biases and other parameters of the block stay in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from sparsebit.execution.blocks.training import ParameterGroup, update
from sparsebit.llm.checkpoint.packed_folder import FinishedBlock, Measured
from sparsebit.llm.layers.float_weight import integers
from sparsebit.llm.models.architectures import linears
from sparsebit.llm.quantizing.learned_rounding import LearnedLayer, computing_with

_MEAN, _SQUARE = "mean", "square"


class LearnedBlock:
    """`block`: a filled float block, which computes with the learned weights from now on, until `close`."""

    def __init__(self, block: nn.Module, finished: FinishedBlock, rates: tuple[float, float]) -> None:
        self.block, self.finished, self.rates = block, finished, rates
        modules = linears(block)
        for name, value in finished.others.items():
            parameter = block.get_parameter(name)
            parameter.data = value.to(parameter)
        self.layers = {
            name: LearnedLayer(modules[name].weight, integers(weight), "latent")
            for name, weight in sorted(finished.layers.items())
        }
        for name in self.layers:
            modules[name].weight = nn.Parameter(modules[name].weight.to("meta"), requires_grad=False)
        self._open = contextlib.ExitStack()
        self._open.enter_context(computing_with(block, self.layers))

    def state(self) -> dict[str, Tensor]:
        """The learned tensors, and zeros for the means of their gradients."""
        found = {name: one.detach() for layer, own in self.layers.items() for name, one in own.state(layer).items()}
        zeros = {f"{name}.{kind}": torch.zeros_like(one) for name, one in found.items() for kind in (_MEAN, _SQUARE)}
        return found | zeros

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Compute with the tensors of a state from now on."""
        for name, layer in self.layers.items():
            layer.take(name, state)

    def release(self) -> None:
        """Hold no tensors of a state any more."""
        for layer in self.layers.values():
            layer.release()

    def parameters(self) -> list[Tensor]:
        return [one for group in self._groups() for one in group.parameters]

    def step(self, state: Mapping[str, Tensor], gradients: Sequence[Tensor | None], number: int, rate: float) -> None:
        """One step of Adam, the `number`-th from 0, in place of the tensors of `state`, which the block has taken."""
        names = {id(one): key for name, layer in self.layers.items() for key, one in layer.state(name).items()}
        moments = [
            (state[f"{names[id(one)]}.{_MEAN}"], state[f"{names[id(one)]}.{_SQUARE}"]) for one in self.parameters()
        ]
        update(self._groups(rate), gradients, moments, number)

    def result(self) -> FinishedBlock:
        """The block with its learned codes and scales. Errors of single layers would be those before."""
        layers = {name: layer.packed() for name, layer in self.layers.items()}
        measured = {name: Measured(one.float_bytes) for name, one in self.finished.measured.items()}
        done = self.finished
        return FinishedBlock(layers, done.tokens, done.others, done.scales, done.stages, measured)

    def close(self) -> None:
        self._open.close()

    def _groups(self, rate: float = 1.0) -> list[ParameterGroup]:
        rates = (rate * self.rates[0], rate * self.rates[1])
        return [group for layer in self.layers.values() for group in layer.latent_groups(rates)]
