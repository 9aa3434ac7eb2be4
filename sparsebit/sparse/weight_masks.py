"""Masks of weights: buffers beside the parameters, zeros that stay zero, and gradients that are zero there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.graph.copying import copy_model

_SUFFIX = "_mask"


class WeightMasks:
    """The masks of some parameters of a model, each a buffer of the same module: `conv.weight`, `conv.weight_mask`.

    A weight's gradient is zero where its mask is, so that an optimizer leaves it alone; what momentum from before moves
    all the same, `apply` sets back to zero.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self.model, self.names = model, tuple(names)
        for name in self.names:
            module, parameter = self.owner(name)
            if hasattr(module, parameter + _SUFFIX):
                raise ConfigError(f"{name}{_SUFFIX} is taken: a mask would need this name; rename it in your model")
            weight: Tensor = getattr(module, parameter)
            module.register_buffer(parameter + _SUFFIX, torch.ones_like(weight, dtype=torch.bool))
            if weight.requires_grad:
                weight.register_hook(_MaskGradient(module, parameter + _SUFFIX))

    def owner(self, name: str) -> tuple[nn.Module, str]:
        """The module that has the parameter, and its name there."""
        path, _, parameter = name.rpartition(".")
        return self.model.get_submodule(path), parameter

    def by_name(self) -> dict[str, Tensor]:
        """The masks, by the names of the weights; False is pruned."""
        return {name: getattr(module, parameter + _SUFFIX) for name, (module, parameter) in self._owners()}

    @torch.no_grad()
    def apply(self) -> None:
        """Put zeros where the masks have them."""
        for _, (module, parameter) in self._owners():
            getattr(module, parameter).masked_fill_(~getattr(module, parameter + _SUFFIX), 0)

    def plain_copy(self) -> nn.Module:
        """A copy of the model with the zeros, and without masks."""
        self.apply()
        plain = copy_model(self.model)
        for parameter in plain.parameters():
            hooks: Any = parameter._backward_hooks
            for key in [key for key, hook in (hooks or {}).items() if isinstance(hook, _MaskGradient)]:
                del hooks[key]
        for name in self.names:
            path, _, own = name.rpartition(".")
            delattr(plain.get_submodule(path), own + _SUFFIX)
        return plain

    def _owners(self) -> list[tuple[str, tuple[nn.Module, str]]]:
        return [(name, self.owner(name)) for name in self.names]


class _MaskGradient:
    """A hook of a parameter: the gradient times the mask."""

    def __init__(self, module: nn.Module, mask: str) -> None:
        self.module, self.mask = module, mask

    def __call__(self, gradient: Tensor) -> Tensor:
        mask: Tensor = getattr(self.module, self.mask)
        return gradient * mask
