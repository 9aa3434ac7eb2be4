"""Perplexity of the float model and of the packed one made from it, for the table of `sparsebit llm quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def heldout_windows(
    model: Path, text: Path, length: int, num_windows: int | None, *, trust_remote_code: bool
) -> Tensor:
    """The windows of the text, as `sparsebit llm eval` cuts them; read first, before hours of work."""
    from sparsebit.llm import token_stream, windows
    from sparsebit.llm.models.hub_classes import load_tokenizer

    return windows(token_stream(text, load_tokenizer(model, trust_remote_code=trust_remote_code)), length, num_windows)


def heldout_perplexities(
    model: Path, packed: Path, tokens: Tensor, *, batch_size: int, device: str, trust_remote_code: bool
) -> dict[str, Any]:
    """Perplexities of both models; blocks are streamed, so that models larger than the memory are measured too."""
    from sparsebit.llm import load_streamed, perplexity

    before, after = (
        perplexity(
            load_streamed(folder, device=device, trust_remote_code=trust_remote_code), tokens, batch_size=batch_size
        )
        for folder in (model, packed)
    )
    return {
        "float": before.value,
        "packed": after.value,
        "windows": before.num_windows,
        "length": int(tokens.shape[1]),
    }


def told(found: dict[str, Any] | None) -> str:
    """One line for the table."""
    if found is None:
        return ""
    change = found["packed"] / found["float"] - 1
    size = f"{found['windows']} windows of {found['length']} tokens"
    return f"{found['float']:.2f} float, {found['packed']:.2f} packed ({change:+.1%}), {size}"
