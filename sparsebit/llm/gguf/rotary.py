"""Rotary embeddings in GGUF files: the base, a linear factor, or factors for each frequency (Llama 3.1, Phi-3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import DeploymentError

PLAIN, LINEAR, THIRD, LONG = "default", "linear", "llama3", "longrope"


def is_plain(config: Any) -> bool:
    """Whether whole heads are rotated, by the frequencies of their base."""
    return _kind(config) == PLAIN and _part(config) == 1.0


def _kind(config: Any) -> str:
    return str(_whole(config).get("rope_type", PLAIN))


def _part(config: Any) -> float:
    return float(_whole(config).get("partial_rotary_factor", 1.0))


def _whole(config: Any) -> dict[str, Any]:
    """The settings of layers that attend to the whole text; layers with a window may have others (Gemma 3)."""
    rope = config.rope_parameters or {}
    return dict(rope.get("full_attention", rope))


def add_rotary(writer: Any, config: Any, width: int, kinds: tuple[str, ...], *, is_partial: bool) -> None:
    """Write the rotation of the heads. `width`: of a head. `kinds`: the types that llama.cpp computes.

    `is_partial`: it turns a part of each head, if the file says so.
    """
    rope, kind, part = _whole(config), _kind(config), _part(config)
    local = (config.rope_parameters or {}).get("sliding_attention", {})
    is_scaled = local.get("rope_type", PLAIN) != PLAIN
    if kind not in kinds or is_scaled or (part != 1.0 and not is_partial):
        raise DeploymentError(
            f"rotary embeddings {dict(config.rope_parameters)} are not written to GGUF files of {config.model_type} "
            f"models; only types {', '.join(kinds)}{'' if is_partial else ', of whole heads'}"
        )
    writer.add_rope_dimension_count(int(width * part))
    writer.add_rope_freq_base(float(rope.get("rope_theta") or 10000.0))
    if local:
        writer.add_rope_freq_base_swa(float(local["rope_theta"]))
    if kind in (LINEAR, LONG):
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    if kind == LINEAR:
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if kind == LONG:
        writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))
        writer.add_rope_scaling_attn_factors(_computed(config)[1])


def frequency_factors(config: Any) -> dict[str, Tensor]:
    """The divisors of the base's frequencies, `(rotated width / 2,)`, by the names of these tensors.

    Phi-3 has others for long texts: llama.cpp uses them if its context is longer than the model's original one,
    transformers if the text is.
    """
    if _kind(config) == LONG:
        lists = {length: config.rope_parameters[f"{length}_factor"] for length in ("long", "short")}
        return {f"rope_factors_{length}.weight": torch.tensor(factors).float() for length, factors in lists.items()}
    if _kind(config) != THIRD:
        return {}
    frequencies, _ = _computed(config)
    exponents = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
    factors = float(config.rope_parameters["rope_theta"]) ** -exponents / frequencies.double()
    return {"rope_freqs.weight": factors.float()}


def _computed(config: Any) -> tuple[Tensor, float]:
    """The frequencies, and the factor of the rotated heads, as in transformers for a short text."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[_kind(config)](config, torch.device("cpu"))
    return frequencies, float(factor)
