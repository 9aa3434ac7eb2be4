"""`use_packed_cache`: a model whose cache of keys and values holds codes, in every forward outside of training.

transformers' own cache layers stay in charge of lengths, windows, beams and cropping: they hold rows of bytes instead
of rows of numbers, and what attention reads is unpacked from all of them, the new ones included. A forward therefore
computes the same with one call for a text as with one call for each token, and so does a server that reads its cache.
transformers' `QuantizedCache` was not used: it keeps the newest tokens in float, has no calibrated scales for each
head, and cannot be cropped.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.llm.caching.cache_kinds import CacheKind
from sparsebit.llm.caching.row_codes import RowCodes, block_of

log = logging.getLogger(__name__)
_ARGUMENT = "past_key_values"
_ATTRIBUTE = "_sparsebit_cache"
# The classes of transformers' layers that hold one row of keys and of values for each token.
_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")
_WITHOUT_KEYS = ("LinearAttentionLayer",)


@dataclass(frozen=True)
class LayerCodes:
    """How the keys and the values of one layer are packed."""

    keys: RowCodes
    values: RowCodes


def use_packed_cache(model: Any, codes: Mapping[int, LayerCodes]) -> None:
    """Let every forward of a causal language model outside of training read keys and values from a packed cache.

    `codes`: by the number of the layer. A cache that the caller or `generate` passes has its empty layers replaced by
    packed ones; without one, a forward uses its own. Training computes with float keys and values.
    """
    drop_packed_cache(model)
    handles = []
    for module in {model: None, model.base_model: None}:  # some call the decoder inside of their base model
        names = [*inspect.signature(module.forward).parameters]
        if _ARGUMENT not in names:
            raise ConfigError(f"{type(module).__name__} takes no {_ARGUMENT}: its cache cannot be packed")
        packing = _Packing(codes, names.index(_ARGUMENT))
        handles.append(module.register_forward_pre_hook(packing.before, with_kwargs=True))
        handles.append(module.register_forward_hook(packing.after, with_kwargs=True))
    setattr(model, _ATTRIBUTE, (handles, next(iter(codes.values())).keys.kind))


def drop_packed_cache(model: Any) -> None:
    """Undo `use_packed_cache`."""
    handles, _ = model.__dict__.pop(_ATTRIBUTE, ((), None))
    for handle in handles:
        handle.remove()


def packed_cache_kind(model: Any) -> CacheKind | None:
    """The kind of the model's packed cache; None if its cache is float."""
    found: tuple[Any, CacheKind] | None = model.__dict__.get(_ATTRIBUTE)
    return None if found is None else found[1]


def cache_bytes(past_key_values: Any) -> int:
    """The bytes that a cache of transformers holds: codes if it is packed, numbers if not."""
    tensors = [tensor for layer in past_key_values.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class _Packing:
    """The hooks of the decoder."""

    def __init__(self, codes: Mapping[int, LayerCodes], position: int) -> None:
        self.codes, self.position = dict(codes), position

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module.training:
            return None
        found = self._given(args, kwargs)
        if found is None:
            found = _new_cache(module)
        pack_layers(found, self.codes)
        if len(args) > self.position:
            return (*args[: self.position], found, *args[self.position + 1 :]), kwargs
        return args, kwargs | {_ARGUMENT: found}

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if module.training:
            return
        if not self._given(args, kwargs).is_initialized:
            name = type(module).__name__
            raise ConfigError(f"{name} does not use the {_ARGUMENT} that it is given: load it with a float cache")

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[self.position] if len(args) > self.position else kwargs.get(_ARGUMENT)


def _new_cache(module: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=module.config)


def pack_layers(past_key_values: Any, codes: Mapping[int, LayerCodes]) -> None:
    """Replace the empty float layers of a cache by packed ones; filled float layers are an error."""
    if not hasattr(past_key_values, "layers"):
        given = type(past_key_values).__name__
        raise ConfigError(f"{_ARGUMENT} of the class {given}: allowed: the DynamicCache or StaticCache of transformers")
    layers, replicated = past_key_values.layers, past_key_values.layer_class_to_replicate
    if replicated is not None:
        layers += [replicated() for _ in range(len(layers), 1 + max(codes))]
    for number, layer in enumerate(layers):
        name = type(layer).__name__
        if isinstance(layer, _PackedRows) or name in _WITHOUT_KEYS:
            continue
        if name not in _LAYERS or number not in codes:
            raise ConfigError(
                f"layer {number} of the cache is a {name}{'' if name in _LAYERS else ', which cannot be packed'}: "
                f"allowed: {', '.join(_LAYERS)}; load the model with a float cache"
            )
        if layer.is_initialized:
            raise ConfigError(
                f"layer {number} of {_ARGUMENT} holds float keys and values already: begin with a new cache"
            )
        layers[number] = extended(layer, _PackedRows, codes=codes[number])


def extended(layer: Any, behaviour: type, **more: Any) -> Any:
    """A layer of a cache as it is, its window included, with another `update` in front of that of its class."""
    base: Any = type(layer)
    kind = _extended_class(behaviour, base)
    found = kind.__new__(kind)
    found.__dict__.update(layer.__dict__, **more)
    return found


@cache
def _extended_class(behaviour: Any, kind: Any) -> Any:
    return type(f"{behaviour.__name__.lstrip('_')}Of{kind.__name__}", (behaviour, kind), {})


def need_packable(model: Any, codes: Mapping[int, LayerCodes]) -> None:
    """Raise for a model whose cache has layers or heads that cannot be packed."""
    config = model.config.get_text_config(decoder=True)
    pack_layers(_new_cache(model), codes)
    if any(layer.keys.kind == "int4" for layer in codes.values()):
        block_of(int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads))


class _PackedRows:
    """In front of a layer of transformers: it gets rows of bytes, and returns all of them, which are unpacked."""

    codes: LayerCodes

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows = self.codes.keys.pack(key_states), self.codes.values.pack(value_states)
        keys, values = super().update(*rows, *args, **kwargs)  # type: ignore[misc]
        if self.is_compileable and torch.is_grad_enabled() and key_states.requires_grad:  # type: ignore[attr-defined]
            raise ConfigError("a packed cache of fixed size has no gradients: use one that grows, or torch.no_grad()")
        return _unpacked(self.codes.keys, keys, key_states), _unpacked(self.codes.values, values, value_states)


def _unpacked(codes: RowCodes, rows: Tensor, new: Tensor) -> Tensor:
    found = codes.unpack(rows, new.shape[-1], new.dtype)
    if not (torch.is_grad_enabled() and new.requires_grad):
        return found
    count = new.shape[-2]
    rounded = _Rounded.apply(new, found[..., -count:, :])  # type: ignore[no-untyped-call]
    return torch.cat((found[..., :-count, :], rounded), -2)


class _Rounded(torch.autograd.Function):
    """The rounded numbers; the gradient passes to the numbers before rounding."""

    @staticmethod
    def forward(ctx: Any, new: Tensor, rounded: Tensor) -> Tensor:
        return rounded.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None
