"""Weights that a module computes out of other parameters (weight norm, spectral norm, orthogonal), made plain.

A mask holds single numbers of a weight at zero, so the weight must be a parameter: a weight that every forward
computes anew would undo the zeros, or cannot be masked at all.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from sparsebit.sparse.sparse_config import SparseConfig

log = logging.getLogger(__name__)
_OF_CHANNELS = frozenset(("WeightNorm", "_WeightNorm", "_SpectralNorm"))  # classes that prevent removal of channels
FOLDED = "folded"  # the new form of such a layer, in a channel plan


def computed_tensors(module: nn.Module) -> dict[str, str]:
    """The tensors of a module that a parametrization computes, and the name of each one's class."""
    hooks = module._forward_pre_hooks.values()
    found = {name: type(hook).__name__ for hook in hooks if (name := hook_tensor(hook))}
    if parametrize.is_parametrized(module):
        lists: Any = module.parametrizations
        found |= {name: ", ".join(type(step).__name__ for step in steps) for name, steps in lists.items()}
    return found


def without_channels(model: nn.Module) -> dict[str, str]:
    """The layers whose computed weights cannot lose channels, as a part of a channel plan: they become plain."""
    named = {path: set(computed_tensors(module).values()) for path, module in model.named_modules()}
    return {path: FOLDED for path, kinds in named.items() if kinds & _OF_CHANNELS}


def folded_layers(model: nn.Module, config: SparseConfig) -> dict[str, str]:
    """The layers whose computed tensors become plain in a pruned model, as a part of a channel plan.

    Single elements are pruned from plain weights alone. Channels can also leave a computed weight, but not under weight
    norm, which divides the zeros of a masked channel by their norm, nor under torch's newer spectral norm. Layers that
    the config spares stay as they are.
    """
    found = {}
    for path, module in model.named_modules():
        kinds = set(computed_tensors(module).values())
        is_spared = config.is_overridden((path,)) and not config.ratio_of(path)
        if kinds and not is_spared and (not config.SPARSER.is_structured or kinds & _OF_CHANNELS):
            found[path] = FOLDED
            names = ", ".join(kind.strip("_") for kind in sorted(kinds))
            log.warning("%s: the weight that %s computes is a plain weight from here on", path, names)
    return found


def hook_tensor(hook: object) -> str:
    """The tensor that one of torch's older hooks computes before a forward; empty: none."""
    if isinstance(hook, (WeightNorm, SpectralNorm)):
        return str(hook.name)
    return str(hook._tensor_name) if isinstance(hook, prune.BasePruningMethod) else ""


def fold_parametrizations(module: nn.Module) -> None:
    """Make the computed tensors plain parameters with their current values; without any, the module is unchanged."""
    for name in computed_tensors(module):
        if parametrize.is_parametrized(module, name):
            # torch removes a property from the class, which copies share with the original.
            kind = type(module)
            own = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
            module.__class__ = type(kind.__name__, kind.__bases__, own)
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
            _forget_weight_norm(module)
            continue
        by = next(type(hook) for hook in module._forward_pre_hooks.values() if hook_tensor(hook) == name)
        {WeightNorm: remove_weight_norm, SpectralNorm: remove_spectral_norm}.get(by, prune.remove)(module, name)


def _forget_weight_norm(module: nn.Module) -> None:
    """Remove the hook by which weight norm reads older states: it would remain, and cannot be pickled."""
    for key, hook in list(module._load_state_dict_pre_hooks.items()):
        if getattr(getattr(hook, "hook", hook), "__qualname__", "").startswith(f"{weight_norm.__name__}.<locals>"):
            del module._load_state_dict_pre_hooks[key]
