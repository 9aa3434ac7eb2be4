"""`train_block`: optimises some parameters of one block so that its output equals the float model's.

It does not depend on quantization or pruning: the caller defines the learned parameters (`ParameterGroup`), the
distance of outputs and extra terms of the loss. Mini-batches come from `BlockSamples`. Only the given parameters get
gradients; the model's other parameters, and their `grad`, do not change. Two runs with one seed have equal bits.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.execution.blocks.engine import BatchValues, BlockData, mix
from sparsebit.execution.blocks.runner import Values
from sparsebit.execution.blocks.samples import BlockSamples, Minibatch
from sparsebit.execution.distributed import gather, is_distributed
from sparsebit.graph.values.nested import tensors_of
from sparsebit.option_fields import check_options, option
from sparsebit.progress import note

Decay = Literal["constant", "linear", "cosine"]
# (outputs, targets, extras) of some samples -> their distance, as a mean over the samples.
Distance: TypeAlias = Callable[[Values, Values, Values], Tensor]
_CHECKS = 10  # in a training with early stop: how often the loss is checked


@dataclass(frozen=True)
class BlockTraining:
    """How a block is trained.

    `float_share`: share of the inputs' elements that come from the float model; the others come from the preceding
    blocks in their current state. `patience`: stop when the loss of so many tenths of the steps in a row was no better
    than the best one before; 0: never. `bf16`: the forward in bfloat16, on a GPU.
    """

    steps: int = option(500, "steps of the optimizer", least=1)
    batch_size: int = option(32, "samples of a step", least=1)
    seed: int = 0
    float_share: float = option(0.0, "share of float inputs", least=0, most=1)
    patience: int = option(0, "tenths of the steps without a better loss", least=0)
    bf16: bool = False

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with one learning rate. `signed`: a step is the rate times the sign of the gradient."""

    parameters: tuple[Tensor, ...]
    lr: float
    decay: Decay = "constant"
    signed: bool = False
    lowest: float = -math.inf
    highest: float = math.inf


def train_block(
    data: BlockData,
    groups: Sequence[ParameterGroup],
    training: BlockTraining,
    *,
    distance: Distance,
    extras: BatchValues | None = None,
    penalty: Callable[[float], Tensor | None] = lambda progress: None,
    before_step: Callable[[], None] = lambda: None,
) -> float:
    """Train the parameters in place; returns the mean distance of the last tenth of the steps.

    A step's loss is `distance(outputs, targets, extras)` of a mini-batch plus `penalty(progress)`, with progress from 0
    to 1. Mini-batches are drawn from all samples in a fixed order, given by the seed and the block's name. `extras`:
    more values for each batch that the distance needs, with one row per sample. On several ranks each draws from its
    own samples, and gradients are averaged.
    """
    parameters = [parameter for group in groups for parameter in group.parameters]
    if not parameters:
        raise ConfigError(f"block {data.block.name!r}: no parameter to train was given")
    groups = _in_float32(groups)
    learned = [parameter for group in groups for parameter in group.parameters]
    optimizer = _optimizer(groups)
    generator = torch.Generator().manual_seed(block_seed(training.seed, data.block.name))
    samples = BlockSamples(data, extras, needs_float=training.float_share > 0)
    stream = samples.minibatches(training.batch_size, generator)
    watch = _Watch(training)
    for step in range(training.steps):
        progress = step / training.steps
        for own_rate, group in zip(optimizer.param_groups, groups, strict=True):
            own_rate["lr"] = group.lr * decayed(group.decay, progress)
        before_step()
        batch = next(stream)
        with _autocast(batch, training.bf16):
            share = training.float_share
            inputs = mix(batch.inputs, batch.float_inputs, share, generator) if batch.float_inputs else batch.inputs
            outputs = data.run(inputs)
            found = distance(outputs, batch.targets, batch.extras)
        extra_loss = penalty(progress)
        loss = found if extra_loss is None else found + extra_loss
        # `autograd.grad`, not `backward`, which would also write into the `grad` of the model's other parameters.
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for own, gradient in zip(learned, gradients, strict=True):
            own.grad = torch.zeros_like(own) if gradient is None else gradient.to(own.dtype)
        _average(learned)
        optimizer.step()
        _write(parameters, groups)
        if watch.is_over(step, float(found.detach()), data.block.name):
            break
    for own in learned:
        own.grad = None
    return watch.last


@torch.no_grad()
def update(
    groups: Sequence[ParameterGroup],
    gradients: Sequence[Tensor | None],
    moments: Sequence[tuple[Tensor, Tensor]],
    number: int,
) -> None:
    """Step `number`, from 0, of an optimizer whose state is kept elsewhere; all in float32.

    `moments`: the means of each parameter's gradients and of their squares. They and the parameters are written to.
    """
    optimizer = _optimizer(groups)
    parameters = [parameter for group in groups for parameter in group.parameters]
    for parameter, gradient, (mean, square) in zip(parameters, gradients, moments, strict=True):
        optimizer.state[parameter] = {"step": torch.tensor(float(number)), "exp_avg": mean, "exp_avg_sq": square}
        parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
    optimizer.step()
    _write(parameters, groups)
    for parameter in parameters:
        parameter.grad = None


@torch.no_grad()
def mean_distance(data: BlockData, distance: Distance, extras: BatchValues | None = None) -> float:
    """The distance of the block in its current state, over all batches of all ranks."""
    total, count = 0.0, 0
    for index in range(data.num_batches):
        more = () if extras is None else extras[index]
        targets = data.targets[index]
        size = next((len(tensor) for tensor in tensors_of(targets) if tensor.ndim), 1)
        total += size * float(distance(data.run(data.inputs[index]), targets, more))
        count += size
    totals, counts = zip(*gather((total, count)), strict=True)
    return float(sum(totals) / max(sum(counts), 1))


def block_seed(seed: int, name: str) -> int:
    """A seed for one block, which does not depend on the blocks before it: a resumed run skips some."""
    return zlib.crc32(f"{seed}/{name}".encode())


def squared_error(outputs: Values, targets: Values, extras: Values = ()) -> Tensor:
    """The squared error relative to the targets' energy, summed over the block's float outputs.

    `extras`: one weight for each element of each output, in the outputs' structure (Fisher information); without them
    all have the same weight.
    """
    found, weights = [], tensors_of(extras)
    for index, (output, target) in enumerate(zip(tensors_of(outputs), tensors_of(targets), strict=True)):
        if output.is_floating_point():
            error, energy = (output.float() - target.float()).square(), target.float().square()
            if weights:
                error, energy = error * weights[index], energy * weights[index]
            found.append(error.sum() / energy.sum().clamp_min(1e-20))
    if not found:
        raise CalibrationError("the block has no float output, so there is nothing to compare")
    return functools.reduce(torch.add, found)


class _Watch:
    """The loss of the last steps, and whether it still decreases."""

    def __init__(self, training: BlockTraining) -> None:
        self._patience, self._window = training.patience, max(training.steps // _CHECKS, 1)
        self._sum, self._best, self._waited = 0.0, math.inf, 0
        self.last = math.nan

    def is_over(self, step: int, loss: float, name: str) -> bool:
        if not math.isfinite(loss):
            why = f"the loss became {loss} in step {step}; lower the learning rate"
            if step == 0:
                why = (
                    f"the loss is {loss} before anything is learned: the block's inputs, its float outputs or its "
                    "weights are not finite; look for NaN and infinity in the calibration data and in the model"
                )
            raise CalibrationError(f"block {name!r}: {why}")
        self._sum += loss
        if (step + 1) % self._window:
            return False
        sums = gather(self._sum)
        self.last = sum(sums) / len(sums) / self._window
        self._sum = 0.0
        note(f"{name}: loss {self.last:.3g}")
        self._waited = 0 if self.last < self._best else self._waited + 1
        self._best = min(self._best, self.last)
        return 0 < self._patience <= self._waited


def _in_float32(groups: Sequence[ParameterGroup]) -> list[ParameterGroup]:
    """The groups with float32 copies of half-precision parameters, in which small steps would be lost.

    Adam's epsilon is zero in float16, so it would also divide by 0.
    """

    def wide(parameter: Tensor) -> Tensor:
        is_half = parameter.dtype in (torch.float16, torch.bfloat16)
        return parameter.detach().float() if is_half else parameter

    return [replace(group, parameters=tuple(map(wide, group.parameters))) for group in groups]


@torch.no_grad()
def _write(parameters: Sequence[Tensor], groups: Sequence[ParameterGroup]) -> None:
    """Clamp the learned values, and copy them into the parameters."""
    learned = [(own, group) for group in groups for own in group.parameters]
    for parameter, (own, group) in zip(parameters, learned, strict=True):
        if group.lowest > -math.inf or group.highest < math.inf:
            own.clamp_(group.lowest, group.highest)
        if own is not parameter:
            parameter.copy_(own)


def _optimizer(groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
    """Adam. With betas of 0 it has no memory, so that its step is the sign of the gradient (`signed`)."""
    signed = {"betas": (0.0, 0.0), "eps": 1e-12}
    return torch.optim.Adam(
        [{"params": list(g.parameters), "lr": g.lr, **(signed if g.signed else {})} for g in groups], foreach=False
    )


def decayed(decay: Decay, progress: float) -> float:
    """The factor of a learning rate, from 1 to 0."""
    if decay == "constant":
        return 1.0
    return 1 - progress if decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


def _autocast(batch: Minibatch, bf16: bool) -> Any:
    device = next((tensor.device.type for tensor in tensors_of((batch.inputs, batch.targets))), "cpu")
    return torch.autocast(device, torch.bfloat16, enabled=bf16 and device == "cuda")


@torch.no_grad()
def _average(parameters: Sequence[Tensor]) -> None:
    """The gradients of all ranks, averaged."""
    if is_distributed():
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.reshape(gradient.shape))
