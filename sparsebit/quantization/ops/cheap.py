"""Ops that are computed again rather than kept: they keep their input for the backward, and are few operations each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Name in the table of ops: modules, functions. A ReLU is no such op: it keeps its output.
_CHEAP: dict[str, tuple[type[nn.Module], tuple[Callable[..., Any], ...]]] = {
    "layer_norm": (nn.LayerNorm, (F.layer_norm, torch.layer_norm)),
    "group_norm": (nn.GroupNorm, (F.group_norm, torch.group_norm)),
    "gelu": (nn.GELU, (F.gelu,)),
    "silu": (nn.SiLU, (F.silu,)),
    "hardswish": (nn.Hardswish, (F.hardswish,)),
    "hardsigmoid": (nn.Hardsigmoid, (F.hardsigmoid,)),
    "hardtanh": (nn.Hardtanh, (F.hardtanh,)),
    "relu6": (nn.ReLU6, (F.relu6,)),
    "leaky_relu": (nn.LeakyReLU, (F.leaky_relu,)),
}
CHEAP_ROWS = frozenset(_CHEAP)
CHEAP_FUNCTIONS = frozenset(function for _, functions in _CHEAP.values() for function in functions)
CHEAP_MODULES = frozenset({module for module, _ in _CHEAP.values()} | {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d})


class CheapFunction(nn.Module):
    """A function of the model's own code that nothing quantizes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def extra_repr(self) -> str:
        return self.function.__name__
