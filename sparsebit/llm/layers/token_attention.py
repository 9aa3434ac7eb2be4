"""transformers' attention for one token, by `kernels.token_attention` if there is a mask.

There is a mask if the cache has a fixed size, as in a compiled step, or if sequences have different lengths.
transformers then copies keys and values for all heads that share them. Prompts, training, and cases that the kernels do
not support are computed by transformers' own function.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from sparsebit.kernels.token_attention import has_triton, takes, token_attention
from sparsebit.llm.models.architectures import ARCHITECTURES

NAME = "sdpa_of_one_token"  # transformers looks for "sdpa" in it
# Arguments of transformers' function without effect here; with any other one, that function is called.
_WITHOUT_EFFECT = frozenset({"is_causal", "sliding_window", "position_ids", "cache_position", "use_cache"})


def use_token_attention(model: Any) -> bool:
    """Let a model of a known architecture that uses torch's attention use our kernels; returns whether it does."""
    is_known = str(model.config.model_type) in ARCHITECTURES
    if not has_triton() or not is_known or model.config._attn_implementation != "sdpa":
        return False
    _register()
    model.set_attn_implementation(NAME)
    return bool(model.config._attn_implementation == NAME)


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As transformers' own: query `(batch, heads, places, width)`, returns `(batch, places, heads, width)`."""
    given = {name for name, option in options.items() if option is not None and option is not False}
    if attention_mask is None or dropout or given - _WITHOUT_EFFECT or not takes(query, key, value, attention_mask):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        answer: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return answer
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    found = token_attention(query, key, value, attention_mask, scale)
    return found.transpose(1, 2), None
