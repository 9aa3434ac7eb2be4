"""`draw_windows`: calibration windows drawn in equal parts from several kinds of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.llm.models.calibration_text import is_dataset, text_files, token_stream, windows

# The default number of tokens: this many for each column of the widest layer, within these bounds.
TOKENS_PER_COLUMN, LEAST_TOKENS, MOST_TOKENS = 8, 64 * 512, 256 * 512
_MOST_KINDS = 16  # with up to this many files, each counts as a kind of text; with more, the folder is one kind


@dataclass(frozen=True)
class DrawnText:
    """`tokens (samples, length)`, and how many of these windows each text gave, by its path."""

    tokens: Tensor
    shares: Mapping[str, int]


def default_num_windows(widest: int, length: int) -> int:
    """The number of windows for a model whose widest layer has this many columns.

    >>> default_num_windows(1408, 512), default_num_windows(14336, 512), default_num_windows(28672, 512)
    (64, 224, 256)
    """
    return ceil(min(max(TOKENS_PER_COLUMN * widest, LEAST_TOKENS), MOST_TOKENS) / length)


def draw_windows(
    texts: Sequence[Path],
    tokenizer: Any,
    *,
    num_samples: int | None,
    length: int,
    widest: int,
    seed: int = 0,
    chat_template: bool = False,
) -> DrawnText:
    """Different windows of the texts, drawn at random: as many from each text, as far as it has them.

    A folder of 2 to 16 text files counts as that many texts. `num_samples`: None for a number that follows the widest
    layer, or all windows, if they have `LEAST_TOKENS` or more.
    """
    streams: dict[str, Tensor] = {}
    for text in texts:
        streams |= _streams(text, tokenizer, length, chat_template)
    kinds = {name: windows(tokens, length) for name, tokens in streams.items()}
    available = {name: len(every) for name, every in kinds.items()}
    wanted = num_samples
    if wanted is None:
        wanted = default_num_windows(widest, length)
        wanted = min(wanted, max(sum(available.values()), ceil(LEAST_TOKENS / length)))
    shares = even_shares(available, wanted)
    if sum(shares.values()) < wanted:
        raise ConfigError(
            f"text {', '.join(map(str, texts))} has {sum(available.values())} windows of {length} tokens, and {wanted} "
            "are wanted; give more text, or ask for fewer or shorter samples (--num-samples, --length)"
        )
    drawn = []
    for number, (name, every) in enumerate(kinds.items()):
        order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed + number))
        drawn.append(every[order[: shares[name]]])
    tokens = torch.cat(drawn)
    if len(kinds) > 1:  # mix the kinds, because some methods only read the first windows
        tokens = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))]
    return DrawnText(tokens, shares)


def even_shares(available: Mapping[str, int], wanted: int) -> dict[str, int]:
    """Parts of `wanted` that differ by at most one, except where less is available.

    >>> even_shares({"books": 100, "code": 3, "chat": 100}, 32)
    {'books': 15, 'code': 3, 'chat': 14}
    """
    shares = dict.fromkeys(available, 0)
    for _ in range(min(wanted, sum(available.values()))):
        poorest = min((name for name in shares if shares[name] < available[name]), key=lambda name: shares[name])
        shares[poorest] += 1
    return shares


def _streams(text: Path, tokenizer: Any, length: int, chat_template: bool) -> dict[str, Tensor]:
    """The tokens of each kind of text; files of a folder are kinds if there are few and each fills a window."""
    files = [text] if not text.is_dir() or is_dataset(text) else text_files(text)
    if len(files) > _MOST_KINDS:
        return {str(text): token_stream(text, tokenizer, chat_template=chat_template)}
    found = {str(file): token_stream(file, tokenizer, chat_template=chat_template) for file in files}
    if len(files) > 1 and min(map(len, found.values())) < length:
        return {str(text): torch.cat(list(found.values()))}
    return found
