"""`cache_ranges`: the largest keys and values of each layer and head on calibration text."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.graph.state.modes import evaluating
from sparsebit.llm.caching.packed_cache import extended
from sparsebit.llm.models.architectures import architecture_of, blocks_of
from sparsebit.progress import track

# Layers by which compressed-tensors, and therefore transformers, recognizes attention with a cache.
_PROJECTIONS = ("k_proj", "v_proj", "qkv_proj")
_LEAST = 1e-12


@torch.no_grad()
def cache_ranges(model: Any, tokens: Tensor, batch_size: int = 4) -> dict[int, tuple[Tensor, Tensor]]:
    """The largest absolute key and value of each head, `(heads,)`, by the number of the layer, on `tokens (n, length)`.

    The model must have a float cache.
    """
    from transformers import DynamicCache

    largest: dict[int, list[Tensor]] = {}
    device = next(model.parameters()).device
    with evaluating(model):
        for batch in track(tokens.split(batch_size), "ranges of the cache"):
            past = DynamicCache(config=model.config)
            for number, layer in enumerate(past.layers):
                past.layers[number] = extended(layer, _Recording, largest=largest, number=number)
            model.base_model(input_ids=batch.to(device), past_key_values=past, use_cache=True)
    for number, (keys, values) in largest.items():
        if not (keys.isfinite().all() and values.isfinite().all()):
            raise CalibrationError(f"layer {number} computes keys or values that are not finite: they have no range")
    return {number: (keys.clamp(min=_LEAST), values.clamp(min=_LEAST)) for number, (keys, values) in largest.items()}


def attention_paths(model: Any) -> dict[int, str]:
    """The path of the attention with a cache in each block, by the block's number, as servers recognize it."""
    path = architecture_of(model).blocks
    found: dict[int, str] = {}
    for number, block in enumerate(blocks_of(model, architecture_of(model))):
        inside = [name for name, part in block.named_modules() if name and _is_attention(part)]
        if len(inside) != 1:
            kind = type(model).__name__
            raise ConfigError(
                f"{kind} has {len(inside)} modules in block {number} that servers recognize as attention with a cache; "
                "its scales would not be read. Use a cache of kind int4, which needs none"
            )
        found[number] = f"{path}.{number}.{inside[0]}"
    return found


def _is_attention(module: nn.Module) -> bool:
    has_layers = any(hasattr(module, name) for name in _PROJECTIONS)
    is_named = "attention" in type(module).__name__.lower()
    return is_named and has_layers and "past_key_values" in inspect.signature(module.forward).parameters


class _Recording:
    """In front of a layer of transformers: keeps the largest numbers, and nothing else."""

    largest: dict[int, list[Tensor]]
    number: int

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = [states.float().abs().amax((0, 2, 3)).cpu() for states in (key_states, value_states)]
        known = self.largest.get(self.number, new)
        self.largest[self.number] = [torch.maximum(old, found) for old, found in zip(known, new, strict=True)]
        return key_states, value_states
