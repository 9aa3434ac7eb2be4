"""Rotary embeddings in GGUF files: the base, a linear factor, or factors for each frequency (Llama 3.1 and later)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import DeploymentError

_LINEAR, _BY_FREQUENCY = "linear", "llama3"


def rotary_kind(config: Any) -> str:
    """The `rope_type` of the model; "default" where frequencies are as their base says."""
    return str((config.rope_parameters or {}).get("rope_type", "default"))


def add_rotary(writer: Any, config: Any, *, has_factors: bool) -> None:
    """Write what turns the heads. `has_factors`: llama.cpp reads factors for each frequency in this architecture."""
    rope, kind = config.rope_parameters or {}, rotary_kind(config)
    allowed = ["default", _LINEAR, *([_BY_FREQUENCY] if has_factors else [])]
    if kind not in allowed or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise DeploymentError(
            f"rotary embeddings {dict(rope)} are not written to GGUF files of {config.model_type} models; only types "
            f"{', '.join(allowed)}"
        )
    writer.add_rope_freq_base(float(rope.get("rope_theta") or 10000.0))
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
