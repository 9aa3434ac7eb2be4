"""Freezes parts while the weights train: ranges that follow the data, batch-norm statistics, learned scales."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.errors import ConfigError
from sparsebit.graph.rewriting.patterns import is_itself
from sparsebit.quantization.quantizers.base import Quantizer

Part = Literal["observers", "batchnorm", "scales"]
PARTS: tuple[Part, ...] = get_args(Part)

_ABSENT: dict[Part, str] = {
    "observers": "no quantizer follows its data; call init_QAT(follow_ranges=True)",
    "batchnorm": "no batch norm with running statistics is left; set SCHEDULE.BN_TUNING: true, which keeps them",
    "scales": "no quantizer learns its numbers; set QUANTIZER.TYPE to lsq, lsq+ or pact",
}


def chosen(model: nn.Module, parts: tuple[Part, ...]) -> Iterable[Part]:
    """The given parts, checked; without any, all parts that `model` has."""
    for part in parts:
        if part not in PARTS or not _has(model, part):
            raise ConfigError(f"{part} cannot be frozen: {_ABSENT.get(part, 'allowed: ' + ', '.join(PARTS))}")
    return parts or [part for part in PARTS if _has(model, part)]


def hold(model: nn.Module, part: Part, held: bool) -> None:
    """Freeze a part (`held`), or unfreeze it."""
    if part == "batchnorm":
        hold_statistics(model, held)
        return
    for quantizer in _quantizers(model):
        if part == "observers":
            quantizer.is_held = held
        else:
            _hold_scales(quantizer, held)


def _hold_scales(quantizer: Quantizer, held: bool) -> None:
    """Only affects scales that were learning: a parameter that the user froze stays frozen."""
    names = quantizer.held_parameters
    if held:
        names |= {name for name, parameter in quantizer.named_parameters() if parameter.requires_grad}
    for name in names:
        parameter = quantizer.get_parameter(name)
        parameter.requires_grad_(not held)
        parameter.grad = None  # an optimizer with momentum would still change a parameter that has a gradient
    if not held:
        names.clear()


def hold_statistics(model: nn.Module, held: bool) -> None:
    """`held`: norms use their running statistics and do not update them; otherwise they follow the model's mode."""
    for norm in _norms(model):
        norm.train(model.training and not held)


def _has(model: nn.Module, part: Part) -> bool:
    if part == "batchnorm":
        return bool(_norms(model))
    if part == "observers":
        return any(quantizer.follows for quantizer in _quantizers(model))
    return any(True for quantizer in _quantizers(model) for _ in quantizer.parameters())


def _quantizers(model: nn.Module) -> list[Quantizer]:
    return [module for module in model.modules() if isinstance(module, Quantizer) and not module.fake_fused]


def _norms(model: nn.Module) -> list[_BatchNorm]:
    return [m for m in model.modules() if is_itself(m, _BatchNorm) and m.running_mean is not None]
