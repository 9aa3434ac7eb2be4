"""The architectures of GGUF files, a row each, and their rotary embeddings.

llama.cpp computes each architecture with some settings fixed in its code and others read from the file. A row says
which are which. A model whose settings differ from the fixed ones is an error (`gguf_architecture`), because llama.cpp
would compute something else without a warning. `unnamed_settings` are those that llama.cpp reads and transformers does
not; the check by transformers must be given them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    """Write the rotation of heads of this width. `kinds`: of llama.cpp; `is_partial`: it turns a part of a head."""
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
    """The divisors of the base's frequencies, `(rotated width / 2,)`, by the names of these tensors. Phi-3 has others
    for long texts: llama.cpp uses them if its context is longer than the original one, transformers if the text is.
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


_BIASES = ("attention_bias", "mlp_bias")


@dataclass(frozen=True)
class GgufArchitecture:
    """`name`: of the architecture in the file. `rotates_pairs`: rows of q and k are reordered.

    `rotary`: the types of rotary embeddings that llama.cpp computes. `is_partly_rotated`: it turns a part of each head,
    if the file specifies it. `norm_offset`: the value added to the weights of norms. `whole_every`: of this many layers
    the last attends to the whole text, the others to a window. `activation`: the only one that it computes.
    `has_biases`: it reads those of all layers. `has_wide_heads`: the file contains the width of a head; otherwise all
    heads together are as wide as the hidden states. `fixed`: settings that it does not read, with the values that it
    assumes. `has_reader`: transformers reads such files. `unread`: settings that it does not read from the file.
    """

    name: str
    rotates_pairs: bool = False
    rotary: tuple[str, ...] = (PLAIN, LINEAR)
    is_partly_rotated: bool = False
    norm_offset: float = 0.0
    whole_every: int = 1
    activation: str = "silu"
    has_biases: bool = False
    has_wide_heads: bool = True
    fixed: Mapping[str, Any] = field(default_factory=dict)
    has_reader: bool = True
    unread: tuple[str, ...] = ()


_LLAMA = GgufArchitecture("llama", rotates_pairs=True, rotary=(PLAIN, LINEAR, THIRD), has_biases=True)
# By `model_type` of config.json.
ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": replace(_LLAMA, has_biases=False, has_reader=False),
    "qwen2": GgufArchitecture("qwen2", has_wide_heads=False),
    "qwen3": GgufArchitecture("qwen3", unread=("head_dim",)),
    "qwen3_moe": GgufArchitecture(
        "qwen3moe",
        fixed={"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
        unread=("head_dim", "norm_topk_prob", "moe_intermediate_size"),
    ),
    "gemma3_text": GgufArchitecture(
        "gemma3",
        norm_offset=1.0,
        whole_every=6,
        activation="gelu_pytorch_tanh",
        fixed={"attn_logit_softcapping": None, "final_logit_softcapping": None, "use_bidirectional_attention": False},
        unread=("query_pre_attn_scalar", "rope_parameters"),
    ),
    "phi3": GgufArchitecture(
        "phi3",
        rotary=(PLAIN, LONG),
        is_partly_rotated=True,
        has_wide_heads=False,
        unread=("original_max_position_embeddings",),
    ),
    "phi": GgufArchitecture(
        "phi2",
        is_partly_rotated=True,
        activation="gelu_new",
        has_wide_heads=False,
        fixed={"qk_layernorm": False, "tie_word_embeddings": False},
        has_reader=False,
    ),
}


def gguf_architecture(config: Any) -> GgufArchitecture:
    """The row of the model; raises for settings that llama.cpp does not read from the file and assumes otherwise."""
    row = ARCHITECTURES.get(config.model_type)
    if row is None:
        raise DeploymentError(f"GGUF files of model type {config.model_type!r}: allowed: {', '.join(ARCHITECTURES)}")
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    needed: dict[str, tuple[Any, Any]] = {"activation": (activation, row.activation)}
    if not row.has_biases:
        needed |= {name: (bool(getattr(config, name, False)), False) for name in _BIASES}
    if not row.has_wide_heads:
        needed["head_dim"] = (head_width(config), config.hidden_size // config.num_attention_heads)
    if row.name == "gemma3":
        width = config.hidden_size // config.num_attention_heads if config.num_hidden_layers == 62 else config.head_dim
        needed["query_pre_attn_scalar"] = (config.query_pre_attn_scalar, width)
    needed |= {name: (getattr(config, name, value), value) for name, value in row.fixed.items()}
    for name, (found, wanted) in needed.items():
        if found != wanted:
            raise DeploymentError(f"{name} {found!r}: llama.cpp computes models of {row.name} with {wanted!r} alone")
    return row


def head_width(config: Any) -> int:
    """How many numbers a head has."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def text_length(config: Any) -> int:
    """The longest text in tokens: shorter than the model's if all layers have a window, as llama.cpp attends to all."""
    length = int(config.max_position_embeddings)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is None or ARCHITECTURES[config.model_type].whole_every > 1:
        return length
    return min(length, int(window))


def unnamed_settings(config: Any) -> dict[str, Any]:
    """Settings that transformers does not find in the file: it has no key for biases, and it leaves some keys out."""
    found: dict[str, Any] = {name: True for name in _BIASES if getattr(config, name, False)}
    usual = type(config)()
    settings = {name: getattr(config, name) for name in ARCHITECTURES[config.model_type].unread}
    found |= {name: value for name, value in settings.items() if value != getattr(usual, name, None)}
    if not is_plain(config):
        found["rope_parameters"] = dict(config.rope_parameters)
        if text_length(config) < config.max_position_embeddings:  # of which rotary embeddings may be made
            found["max_position_embeddings"] = config.max_position_embeddings
    return found
