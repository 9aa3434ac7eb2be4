"""Rotary embeddings in GGUF files: the base, a linear factor, or factors for each frequency (Llama 3.1 and later)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import DeploymentError

_LINEAR, _BY_FREQUENCY = "linear", "llama3"


def rotary_kind(config: Any) -> str:
    """The `rope_type` of the model; "default" where frequencies are as their base says."""
    return str(_whole(config).get("rope_type", "default"))


def _whole(config: Any) -> dict[str, Any]:
    """Of layers that attend to the whole text; those with a window may have others (Gemma 3)."""
    rope = config.rope_parameters or {}
    return dict(rope.get("full_attention", rope))


def add_rotary(writer: Any, config: Any, *, has_factors: bool) -> None:
    """Write what turns the heads. `has_factors`: llama.cpp reads factors for each frequency in this architecture."""
    rope, kind = _whole(config), rotary_kind(config)
    local = (config.rope_parameters or {}).get("sliding_attention", {})
    allowed = ["default", _LINEAR, *([_BY_FREQUENCY] if has_factors else [])]
    is_scaled = local.get("rope_type", "default") != "default"
    if kind not in allowed or is_scaled or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise DeploymentError(
            f"rotary embeddings {dict(config.rope_parameters)} are not written to GGUF files of {config.model_type} "
            f"models; only types {', '.join(allowed)}"
        )
    writer.add_rope_freq_base(float(rope.get("rope_theta") or 10000.0))
    if local:
        writer.add_rope_freq_base_swa(float(local["rope_theta"]))
    if kind == _LINEAR:
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))


def frequency_factors(config: Any) -> Tensor | None:
    """By what the frequencies of the base are divided, `(width of a head / 2,)`; None where all are one number."""
    if rotary_kind(config) != _BY_FREQUENCY:
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, _ = ROPE_INIT_FUNCTIONS[_BY_FREQUENCY](config, torch.device("cpu"))
    exponents = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
    return (float(config.rope_parameters["rope_theta"]) ** -exponents / frequencies.double()).float()
