"""`train_block`: optimises some parameters of one block so that its output equals the float model's.

It does not depend on quantization or pruning: the caller defines the learned parameters (`ParameterGroup`), the
distance of outputs and extra terms of the loss. Mini-batches come from `BlockSamples`. Only the given parameters get
gradients; the model's other parameters, and their `grad`, do not change. Two runs with one seed have equal bits.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.execution.blocks.captured_step import CapturedStep
from sparsebit.execution.blocks.engine import BatchValues, BlockData, mix
from sparsebit.execution.blocks.runner import Values
from sparsebit.execution.blocks.samples import BlockSamples
from sparsebit.execution.distributed import gather, is_distributed
from sparsebit.graph.values.nested import tensors_of
from sparsebit.option_fields import check_options, option
from sparsebit.progress import note

Decay = Literal["constant", "linear", "cosine"]
# (outputs, targets, extras) of some samples -> their distance, as a mean over the samples.
Distance: TypeAlias = Callable[[Values, Values, Values], Tensor]
_CHECKS = 10  # in a training with early stop: how often the loss is checked


class Teaching(Protocol):
    """What a block learns, if that is not stored: `renewed` makes other inputs, `targets` is the float model's answer
    to them, and `run` that of the block in its current state.
    """

    def renewed(self, inputs: Values, generator: torch.Generator) -> Values: ...

    def targets(self, inputs: Values) -> Values: ...

    def run(self, inputs: Values) -> Values: ...


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
    penalty: Callable[[float], Tensor | None] | None = None,
    before_step: Callable[[], None] = lambda: None,
    teacher: Teaching | None = None,
    is_hopeless: Callable[[float], bool] = lambda progress: False,
) -> float:
    """Train the parameters in place; returns the mean distance of the last tenth of the steps.

    A step's loss is `distance(outputs, targets, extras)` of a mini-batch plus `penalty(progress)`, with progress from 0
    to 1. Mini-batches are drawn from all samples in a fixed order, given by the seed and the block's name. `extras`:
    more values for each batch that the distance needs, with one row per sample. On several ranks each draws from its
    own samples, and gradients are averaged. `teacher`: makes other inputs of those of a mini-batch, and their targets;
    on one GPU, and without a penalty, such a step is captured as a CUDA graph. `is_hopeless(progress)`: asked after
    each tenth of the steps whether to stop.
    """
    groups = _merged(groups)
    parameters = [parameter for group in groups for parameter in group.parameters]
    if not parameters:
        raise ConfigError(f"block {data.block.name!r}: no parameter to train was given")
    groups = _in_float32(groups)
    learned = [parameter for group in groups for parameter in group.parameters]
    is_captured = teacher is not None and penalty is None and not training.bf16 and not is_distributed()
    rates = _Rates(groups, is_captured and all(parameter.is_cuda for parameter in learned))
    generator = torch.Generator().manual_seed(block_seed(training.seed, data.block.name))
    samples = BlockSamples(data, extras, needs_float=training.float_share > 0)
    stream, share = samples.minibatches(training.batch_size, generator), training.float_share
    watch, run, progress = _Watch(training), data.run if teacher is None else teacher.run, 0.0

    def learn(inputs: Values, targets: Values, extras: Values) -> Tensor:
        with _autocast(inputs, training.bf16):
            targets = targets if teacher is None else teacher.targets(inputs)
            found = distance(run(inputs), targets, extras)
        extra_loss = None if penalty is None else penalty(progress)
        loss = found if extra_loss is None else found + extra_loss
        # `autograd.grad`, not `backward`, which would also write into the `grad` of the model's other parameters.
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for own, gradient in zip(learned, gradients, strict=True):
            own.grad = torch.zeros_like(own) if gradient is None else gradient.to(own.dtype)
        _average(learned)
        rates.optimizer.step()
        _write(parameters, groups)
        return found.detach()

    one_step = CapturedStep(learn, [*learned, *parameters], rates.optimizer, is_wanted=is_captured)
    for step in range(training.steps):
        progress = step / training.steps
        rates.set(progress)
        before_step()
        batch = next(stream)
        inputs = mix(batch.inputs, batch.float_inputs, share, generator) if batch.float_inputs else batch.inputs
        inputs = inputs if teacher is None else teacher.renewed(inputs, generator)
        found = one_step(inputs, batch.targets if teacher is None else (), batch.extras)
        if watch.is_over(step, found, data.block.name):
            break
        if watch.is_tenth(step) and step + 1 < training.steps and is_hopeless((step + 1) / training.steps):
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
    optimizer = _Rates(groups, on_device=False).optimizer
    parameters = [parameter for group in groups for parameter in group.parameters]
    for parameter, gradient, (mean, square) in zip(parameters, gradients, moments, strict=True):
        step = torch.tensor(float(number), device=parameter.device)
        optimizer.state[parameter] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}
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


class _Watch:
    """The loss of the last steps, and whether it still decreases."""

    def __init__(self, training: BlockTraining) -> None:
        self._patience, self._window = training.patience, max(training.steps // _CHECKS, 1)
        self._sum, self._best, self._waited = torch.zeros(()), math.inf, 0
        self.last = math.nan

    def is_tenth(self, step: int) -> bool:
        return not (step + 1) % self._window

    def is_over(self, step: int, found: Tensor, name: str) -> bool:
        self._sum = self._sum.to(found) + found
        # Not in every step: reading a number waits for the GPU.
        if step and found.is_cuda and not self.is_tenth(step):
            return False
        loss = float(self._sum)
        if not math.isfinite(loss):
            why = f"the loss became {float(found)} in step {step}; lower the learning rate"
            if step == 0:
                why = (
                    f"the loss is {loss} before anything is learned: the block's inputs, its float outputs or its "
                    "weights are not finite; look for NaN and infinity in the calibration data and in the model"
                )
            raise CalibrationError(f"block {name!r}: {why}")
        if not self.is_tenth(step):
            return False
        sums = gather(loss)
        self.last = sum(sums) / len(sums) / self._window
        self._sum = torch.zeros(())
        note(f"{name}: loss {self.last:.3g}")
        self._waited = 0 if self.last < self._best else self._waited + 1
        self._best = min(self._best, self.last)
        return 0 < self._patience <= self._waited


def _merged(groups: Sequence[ParameterGroup]) -> list[ParameterGroup]:
    """Groups that differ in their parameters alone, as one: an optimizer's step launches kernels for each group."""
    found: dict[ParameterGroup, tuple[Tensor, ...]] = {}
    for group in groups:
        kind = replace(group, parameters=())
        found[kind] = (*found.get(kind, ()), *group.parameters)
    return [replace(kind, parameters=parameters) for kind, parameters in found.items()]


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


class _Rates:
    """Adam, and its learning rates. With betas of 0 it has no memory, so that its step is the sign of the gradient
    (`signed`). `on_device`: the rates are tensors there, so that a captured step reads those of today.
    """

    def __init__(self, groups: Sequence[ParameterGroup], on_device: bool) -> None:
        signed, first = {"betas": (0.0, 0.0), "eps": 1e-12}, groups[0].parameters[0]
        self._groups, self._rates = groups, None
        found = [{"params": list(g.parameters), "lr": g.lr, **(signed if g.signed else {})} for g in groups]
        if on_device:
            self._rates = torch.tensor([group.lr for group in groups], device=first.device)
            found = [{**group, "lr": rate} for group, rate in zip(found, self._rates.unbind(), strict=True)]
        on_gpu = all(parameter.is_cuda for group in groups for parameter in group.parameters)
        self.optimizer = torch.optim.Adam(found, foreach=False, fused=on_gpu, capturable=on_device)

    def set(self, progress: float) -> None:
        rates = [group.lr * decayed(group.decay, progress) for group in self._groups]
        if self._rates is not None:
            self._rates.copy_(torch.tensor(rates))
            return
        for own, rate in zip(self.optimizer.param_groups, rates, strict=True):
            own["lr"] = rate


def decayed(decay: Decay, progress: float) -> float:
    """The factor of a learning rate, from 1 to 0."""
    if decay == "constant":
        return 1.0
    return 1 - progress if decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


def _autocast(inputs: Values, bf16: bool) -> Any:
    device = next((tensor.device.type for tensor in tensors_of(inputs)), "cpu")
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
