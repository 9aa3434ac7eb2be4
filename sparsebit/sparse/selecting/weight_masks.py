"""Masks of weights: buffers next to the parameters that keep pruned weights and their gradients at zero.

The masks act inside the model, by hooks of its modules: in every mode, through every way into the model, and in copies
(`copy.deepcopy`, pickle, an average of models), which make their own gradient hooks at their first forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.graph.values.copying import copy_model

_SUFFIX = "_pruned"
_EARLIER_SUFFIX = "_mask"  # of earlier versions: True where a weight is kept


class WeightMasks:
    """The masks of some parameters of a model, each a buffer of the same module: `conv.weight`, `conv.weight_pruned`.

    The buffer is 0 where the weight is kept and another number where it is pruned. An average of models averages
    buffers too: zeros stay zeros in every average, and a weight that is pruned in one of the models is pruned in the
    average. A weight's gradient is zero where it is pruned, so that an optimizer leaves it alone; earlier momentum may
    still move it, and `apply` sets it back to zero.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self.model, self.names = model, tuple(names)
        owned: defaultdict[str, tuple[str, ...]] = defaultdict(tuple)
        for name in self.names:
            module, parameter = _owner(model, name)
            if hasattr(module, parameter + _SUFFIX):
                raise ConfigError(f"{name}{_SUFFIX} is taken: a mask would need this name; rename it in your model")
            weight: Tensor = getattr(module, parameter)
            module.register_buffer(parameter + _SUFFIX, torch.zeros_like(weight, dtype=torch.float16))
            owned[name.rpartition(".")[0]] += (parameter,)
        for path, parameters in owned.items():
            module, apply = model.get_submodule(path), _ApplyMasks({"": parameters}, only_changed=True)
            module.register_forward_pre_hook(apply)
            module.register_state_dict_pre_hook(apply)
            # `nn.MultiheadAttention` reads the weight of its `out_proj` without calling that layer, so the layer's own
            # hook would not run.
            above, _, name = path.rpartition(".")
            if isinstance(reader := model.get_submodule(above), nn.MultiheadAttention):  # it does not call its layer
                reader.register_forward_pre_hook(_ApplyMasks({name: parameters}, only_changed=True))
        self._every = _ApplyMasks(owned, only_changed=False)
        if owned:
            model.register_forward_pre_hook(self._every, prepend=True)
        self.apply()

    def by_name(self) -> dict[str, Tensor]:
        """Copies of the masks, by the names of the weights; False is pruned."""
        return {
            name: getattr(module, own + _SUFFIX) == 0
            for name in self.names
            for module, own in [_owner(self.model, name)]
        }

    @torch.no_grad()
    def write(self, masks: Mapping[str, Tensor]) -> None:
        """Take new masks; False is pruned."""
        for name, mask in masks.items():
            module, own = _owner(self.model, name)
            getattr(module, own + _SUFFIX).copy_(~mask.bool())
            if (
                gradient := getattr(module, own).grad
            ) is not None:  # an earlier gradient that an optimizer may still use
                gradient.mul_(mask.to(gradient))

    def apply(self) -> None:
        """Put zeros where the masks have them."""
        self._every(self.model)

    def read_earlier_names(self, state: dict[str, Tensor], prefix: str) -> None:
        """Rewrite the masks in a state of an earlier version, in place."""
        for name in self.names:
            if (mask := state.pop(f"{prefix}{name}{_EARLIER_SUFFIX}", None)) is not None:
                state[f"{prefix}{name}{_SUFFIX}"] = mask == 0

    @torch.no_grad()
    def write_weight(self, name: str, value: Tensor) -> None:
        self.model.get_parameter(name).copy_(value)

    def plain_copy(self) -> nn.Module:
        """A copy of the model with the zeros, and without masks."""
        self.apply()
        plain = copy_model(self.model)
        for parameter in plain.parameters():
            hooks: Any = parameter._backward_hooks
            for key in [key for key, hook in (hooks or {}).items() if isinstance(hook, _MaskGradient)]:
                del hooks[key]
        for name in self.names:
            module, own = _owner(plain, name)
            delattr(module, own + _SUFFIX)
        return plain


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has the parameter, and its name there."""
    path, _, parameter = name.rpartition(".")
    return model.get_submodule(path), parameter


class MaskedModule(nn.Module):
    """Calls `model`, whose masks stay in force: in copies, in loaded states, and when training ends."""

    model: nn.Module
    _weights: WeightMasks

    @property
    def masks(self) -> dict[str, Tensor]:
        """Copies of the masks of all weights that may be pruned, by the weight's name in `model`; False is pruned."""
        return self._weights.by_name()

    def apply_masks(self) -> None:
        """Put zeros where the masks have them."""
        self._weights.apply()

    def masked_model(self) -> nn.Module:
        """A plain copy of the model with zeros in its weights and no masks."""
        return self._weights.plain_copy()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.apply_masks()  # copies and pickles of parameters have no gradient hooks

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._weights.read_earlier_names(state_dict, f"{prefix}model.")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def train(self, mode: bool = True) -> Self:
        """As every module's; leaving training puts the zeros in once more."""
        if not mode and hasattr(self, "_weights"):
            self.apply_masks()
        return super().train(mode)


class _ApplyMasks:
    """A hook of a module, before its forward or its `state_dict`: puts zeros into weights of it and of its parts.

    `owned`: the names of the weights, by the path of their module. `only_changed`: look only at weights that were
    written since the last time (by their version), so that a layer that runs inside of the model costs no second pass.
    """

    stays_behind = True  # copies to experiment with, or to quantize, take the weights as they are

    def __init__(self, owned: Mapping[str, tuple[str, ...]], *, only_changed: bool) -> None:
        self.owned, self.only_changed = dict(owned), only_changed
        self.seen: dict[tuple[str, str], tuple[int, int, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "seen": {}}  # a version counts the writes into one tensor; copies count anew

    def __call__(self, module: nn.Module, *_: Any) -> None:
        # While training, a weight may be written through `.data`, which does not change its version.
        is_training = not self.only_changed and (torch.is_grad_enabled() or module.training)
        for path, names in self.owned.items():
            owner = module.get_submodule(path)
            for name in names:
                weight, pruned = getattr(owner, name), getattr(owner, name + _SUFFIX)
                if torch.compiler.is_compiling():  # a version that the code reads would force a recompilation per step
                    weight.data.masked_fill_(pruned != 0, 0)
                    continue
                if weight.requires_grad:
                    _mask_gradient(weight, owner, name + _SUFFIX)
                state = id(weight), weight._version, pruned._version
                if is_training or self.seen.get((path, name)) != state:
                    # `.data`: autograd may still need the weight of an earlier call, whose zeros are the same.
                    weight.data.masked_fill_(pruned != 0, 0)
                    self.seen[path, name] = state


def _mask_gradient(weight: Tensor, owner: nn.Module, mask: str) -> None:
    hooks: Any = weight._backward_hooks
    if not any(isinstance(hook, _MaskGradient) and hook.module is owner for hook in (hooks or {}).values()):
        weight.register_hook(_MaskGradient(owner, mask))


class _MaskGradient:
    """A hook of a parameter: the gradient, with zeros where the weight is pruned."""

    def __init__(self, module: nn.Module, mask: str) -> None:
        self.module, self.mask = module, mask

    def __call__(self, gradient: Tensor) -> Tensor:
        pruned: Tensor = getattr(self.module, self.mask)
        return gradient * (pruned == 0)
