"""Scales of layers' inputs, folded exactly into the norm or the linear layer before it.

`x W^T = (x / s) (s W)^T`. The factor `1 / s` must come from another module: from a norm whose output is `x`, or from
rows of a linear layer that scale `x` (v of attention before o; up before down, which multiplies it with the
activation of gate). These modules are not looked up by their names: candidates are found by running the block,
and a candidate is accepted only if the block proves it. Its channels are scaled by different factors; the input must
scale channel by channel by these factors, and with the weights scaled back the block's output must be unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.llm.models.architectures import linears

_RESIDUAL, _OUTPUT = 1e-3, 1e-4


@dataclass(frozen=True)
class Fold:
    """`source` scales; `owner (in,)`: its channel for each input. `offset`: 1 for a norm with factors `1 + weight`."""

    source: str
    owner: Tensor
    offset: float = 0.0


@dataclass(frozen=True)
class ScaledInput:
    """How the input of some layers is scaled: `alpha`, folded into `source`; or `reason`, why it is not scaled."""

    alpha: float = 0.0
    source: str | None = None
    reason: str | None = None


@torch.no_grad()
def scale_source(block: nn.Module, fold: Fold, factor: Tensor) -> None:
    """Multiply the channels of the fold's source by `factor (channels,)`."""
    module: Any = block.get_submodule(fold.source)
    factor = factor.to(module.weight)
    if module.weight.ndim == 1:
        module.weight.data = (module.weight + fold.offset) * factor - fold.offset
    else:
        module.weight.data = module.weight * factor[:, None]
    if getattr(module, "bias", None) is not None:
        module.bias.data = module.bias * factor


@torch.no_grad()
def scale_readers(block: nn.Module, stage: Sequence[str], scale: Tensor) -> None:
    """Multiply the columns of the layers that read the input by `scale (in,)`."""
    modules = linears(block)
    for name in stage:
        modules[name].weight.data = modules[name].weight * scale.to(modules[name].weight)


@torch.no_grad()
def find_fold(block: nn.Module, stage: Sequence[str], run: Callable[[nn.Module], Tensor]) -> Fold | None:
    """The module that takes the scale of the input of `stage` exactly; None without one. `run`: a block's output."""
    seen = _Seen(block, stage[0], run)
    # Norms, with weights or `1 + weight`, then the layers, the last one first.
    candidates = [(name, offset) for name in seen.norms for offset in (0.0, 1.0)]
    for source, offset in [*candidates, *((name, 0.0) for name in reversed(seen.layers))]:
        fold = _proven(block, stage, run, source, offset, seen)
        if fold is not None:
            return fold
    return None


class _Seen:
    """The input of the layer `head` while the block runs, the block's output, and the modules that ran before it."""

    def __init__(self, block: nn.Module, head: str, run: Callable[[nn.Module], Tensor]) -> None:
        self.block = block
        self.input: Tensor | None = None
        self.norms: list[str] = []
        self.layers: list[str] = []
        self._outputs: dict[str, Any] = {}
        with contextlib.ExitStack() as hooks:
            for name, module in block.named_modules():
                if name and not list(module.children()):
                    note = functools.partial(self._note, name)
                    hooks.enter_context(module.register_forward_hook(note))
            hooks.enter_context(block.get_submodule(head).register_forward_pre_hook(self._reach))
            self.output = run(block)

    def _note(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self.input is None:
            self._outputs[name] = output

    def _reach(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.input, width = args[0], args[0].shape[-1]
        for name, output in self._outputs.items():
            weight = getattr(self.block.get_submodule(name), "weight", None)
            if not isinstance(weight, Tensor):
                continue
            if weight.ndim == 1 and len(weight) == width and output is args[0]:
                self.norms.append(name)
            if weight.ndim == 2 and name in linears(self.block) and width % weight.shape[0] == 0:
                self.layers.append(name)


def _proven(
    block: nn.Module, stage: Sequence[str], run: Callable[[nn.Module], Tensor], source: str, offset: float, plain: _Seen
) -> Fold | None:
    before, expected = plain.input, plain.output
    assert before is not None
    num = len(block.get_submodule(source).weight)  # type: ignore[arg-type]
    order = torch.randperm(num, generator=torch.Generator().manual_seed(0))
    factors = torch.linspace(-0.7, 0.7, num, dtype=torch.float64)[order].exp().to(before.device)
    trial = copy.deepcopy(block)
    scale_source(trial, Fold(source, torch.arange(num), offset), factors)
    after = _Seen(trial, stage[0], run).input
    owner = None if after is None else _owners(before, after, factors)
    if owner is None:
        return None
    scale_readers(trial, stage, 1 / factors[owner])
    # Otherwise something else reads the scaled values too.
    is_same = bool((run(trial) - expected).abs().max() <= _OUTPUT * expected.abs().max())
    return Fold(source, owner, offset) if is_same else None


def _owners(before: Tensor, after: Tensor, factors: Tensor) -> Tensor | None:
    """The index of the factor by which each channel was multiplied; None if a channel was changed otherwise."""
    x, y = (value.reshape(-1, value.shape[-1]).double() for value in (before, after))
    power = x.square().sum(0)
    is_used = power > 0
    ratio = (x * y).sum(0) / power.clamp(min=1e-300)
    if bool(((y - ratio * x).square().sum(0) > _RESIDUAL**2 * power).any()):
        return None
    ordered, index = factors.double().sort()
    place = torch.searchsorted(ordered, ratio.clamp(float(ordered[0]), float(ordered[-1]))).clamp(max=len(ordered) - 1)
    lower = (place - 1).clamp(min=0)
    place = torch.where((ordered[lower] - ratio).abs() < (ordered[place] - ratio).abs(), lower, place)
    owner = index[place]
    if x.shape[1] == len(factors):  # a channel that is always zero is ambiguous: in a one-to-one map it is its own
        owner = torch.where(is_used, owner, torch.arange(len(owner), device=owner.device))
    elif not bool(is_used.all()):
        return None
    step = float(ordered[1] / ordered[0]) - 1 if len(ordered) > 1 else 1.0
    is_near = (factors.double()[owner] / ratio - 1).abs() <= step / 2 + 1e-6
    return owner if bool((is_near | ~is_used).all()) else None
