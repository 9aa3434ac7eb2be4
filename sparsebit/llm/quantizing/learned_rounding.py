"""Learned codes of the blocks of a language model: all layers of a block, and their ranges, learn together.

AutoRound (`sign`; Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent", EMNLP 2024, section 3): an
offset for each weight decides whether it is rounded up or down, and two factors for each group clip its range; both are
moved by the sign of the gradient of the block's error. EfficientQAT (`latent`; Chen et al., 2024, section 3.2): a
latent weight may reach any code, by the gradient itself and Adam. As in the reconstruction of other models, a weight is
a `LearnedCodes` of numerics, and the training is that of `execution/blocks/training.py`. Inputs come from the preceding
quantized blocks, targets from the float model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.execution.blocks.distances import squared_error
from sparsebit.execution.blocks.engine import BatchValues, BlockData
from sparsebit.execution.blocks.find_blocks import Block
from sparsebit.execution.blocks.runner import Values
from sparsebit.execution.blocks.training import (
    BlockTraining,
    Decay,
    ParameterGroup,
    mean_distance,
    train_block,
)
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.llm.models.architectures import linears
from sparsebit.llm.models.calibration_batches import IDS
from sparsebit.llm.quantizing.block_walk import BlockWalk
from sparsebit.llm.quantizing.rounding import smallest_scale
from sparsebit.numerics.rounding.learned_codes import LearnedCodes, StartGrid

_NARROWEST = 0.5  # a learned range, as a share of the initial one
# The same for latent weights, whose range may also grow.
_NARROWEST_LATENT, _WIDEST = 0.2, 1.5
# Learning rates of latent weights of 2 bits, in steps of the grid, and of ranges, as shares of the initial ones.
LATENT_RATES = (2e-3, 3e-4)
LearnedKind = Literal["sign", "latent"]


class LearnedLayer:
    """The weight of a layer whose codes and ranges are learned, starting from the present ones.

    `weight (out, in)`: its float values. Shapes inside are `(out, groups, columns)`, of scales `(out, groups, 1)`.
    """

    def __init__(self, weight: Tensor, start: PackedWeight, kind: LearnedKind = "sign") -> None:
        self.begin, self.shape = start, (start.out_features, start.in_features)
        middle = torch.full_like(start.scales, 1 << start.bits - 1) if start.zeros is None else start.zeros
        scale, zero = (part.to(weight.device, torch.float32)[..., None] for part in (start.scales, middle))
        W = weight.detach().float().reshape(start.out_features, start.scales.shape[1], -1)
        present = start.codes().to(weight.device, torch.float32).view_as(W)
        grid = StartGrid(scale, zero, 0, (1 << start.bits) - 1, start.symmetric)
        self.learned = LearnedCodes(W, present, grid, kind, learns_scale=True)

    def groups(self, steps: int) -> list[ParameterGroup]:
        """For a training of a block that takes so many steps."""
        if self.learned.kind == "latent":
            return self.latent_groups(LATENT_RATES, "cosine")
        lr = 1 / steps
        ranges = ParameterGroup(tuple(self.learned.factors), lr, "linear", signed=True, lowest=_NARROWEST, highest=1.0)
        return [ParameterGroup((self.learned.v,), lr, "linear", signed=True), ranges]

    def latent_groups(self, rates: tuple[float, float], decay: Decay = "constant") -> list[ParameterGroup]:
        """For latent weights; `rates`: as `LATENT_RATES`. With each bit more, codes are nearer to where they belong,
        and the rate is halved: on book-llama at 3 bits, half of the rate that is best at 2 has the least divergence.
        """
        factors, rate = tuple(self.learned.factors), rates[0] * 2.0 ** (2 - self.begin.bits)
        ranges = ParameterGroup(factors, rates[1], decay, lowest=_NARROWEST_LATENT, highest=_WIDEST)
        return [ParameterGroup((self.learned.v,), rate, decay), ranges]

    def state(self, name: str) -> dict[str, Tensor]:
        """All that is learned, by names that begin with `name`."""
        factors = {f"{name}.factor{number}": one for number, one in enumerate(self.learned.factors)}
        return {f"{name}.v": self.learned.v, **factors}

    def take(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Compute with the tensors of a `state` from now on."""
        self.learned.v = state[f"{name}.v"].detach().requires_grad_()
        numbers = range(len(self.learned.factors))
        self.learned.factors = [state[f"{name}.factor{number}"].detach().requires_grad_() for number in numbers]

    def release(self) -> None:
        """Free what is learned, until the next `take`."""
        nothing = torch.empty(0)
        self.learned.v, self.learned.factors = nothing, [nothing] * len(self.learned.factors)

    def weight(self) -> Tensor:
        """The current weight, with straight-through gradients, `(out, in)`."""
        return self.learned.values().reshape(self.shape)

    @torch.no_grad()
    def packed(self) -> PackedWeight:
        """The learned codes, with scales as they are stored."""
        stored = self.begin.scales.dtype
        scale, zero = self.learned.grid()
        codes = (self.learned.steps(scale, zero) + zero).reshape(self.shape).to(torch.uint8).cpu()
        scale = scale.clamp(smallest_scale(stored), torch.finfo(stored).max).to(stored)
        zeros = None if self.begin.zeros is None else zero[..., 0].to(torch.uint8).cpu()
        return PackedWeight.from_codes(codes, scale[..., 0].cpu(), zeros, self.begin.bits)


class _WalkData(BlockData):
    """The values of the walk's current block, for the training."""

    def __init__(self, walk: BlockWalk, block: nn.Module, name: str) -> None:
        self.block, self.num_batches = Block(name, ()), len(walk.batches)
        self._walk, self._module = walk, block
        self.inputs = BatchValues(self.num_batches, lambda index: (walk.present("changed", index),))

    @property
    def float_inputs(self) -> BatchValues:
        return BatchValues(self.num_batches, lambda index: (self._walk.present("float", index),))

    @property
    def targets(self) -> BatchValues:
        return BatchValues(self.num_batches, lambda index: (self._walk.target(index),))

    def run(self, inputs: Values) -> Values:
        return (self._walk.run_some(self._module, inputs[0]),)


def learn_rounding(
    walk: BlockWalk,
    block: nn.Module,
    floats: Callable[[str], Tensor],
    packed: Mapping[str, PackedWeight],
    *,
    kind: LearnedKind,
    steps: int,
    name: str,
) -> dict[str, PackedWeight]:
    """Better codes and ranges for the packed layers of the block, if found; `floats(layer)`: its float weight."""
    layers = {layer: LearnedLayer(floats(layer), weight, kind) for layer, weight in packed.items()}
    data = _WalkData(walk, block, name)
    # Half of the samples of a batch of the walk: twice the steps for the same time.
    training = BlockTraining(steps=steps, batch_size=max(len(walk.batches[0][IDS]) // 2, 1))
    before = mean_distance(data, squared_error)
    with computing_with(block, layers), torch.enable_grad():
        groups = [group for layer in layers.values() for group in layer.groups(steps)]
        train_block(data, groups, training, distance=squared_error)
    found = {layer: learned.packed() for layer, learned in layers.items()}
    modules = linears(block)
    for layer, weight in found.items():
        modules[layer].weight.data = weight.dequantize(torch.float32).to(modules[layer].weight)
    return found if mean_distance(data, squared_error) < before else dict(packed)


@contextlib.contextmanager
def computing_with(block: nn.Module, layers: Mapping[str, LearnedLayer]) -> Iterator[None]:
    """Inside, the layers of the block compute with the learned weights."""
    modules = linears(block)
    for name, layer in layers.items():
        forward = functools.partial(_forward, layer, modules[name].bias)
        modules[name].forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name in layers:
            del modules[name].forward


def _forward(layer: LearnedLayer, bias: Tensor | None, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight().to(x.dtype), bias)
