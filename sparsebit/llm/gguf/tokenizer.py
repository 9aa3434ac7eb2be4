"""The tokenizer of a model folder in a GGUF file: byte-level BPE (Llama 3, Qwen, GPT-2), or sentencepiece (Llama 2).

llama.cpp knows a fixed list of ways to split text (`_PATTERNS`, `_pre`); a tokenizer that splits in another way is an
error, because the model would get other tokens without a warning. Differences that only concern spaces around special
tokens cause a warning.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from sparsebit.errors import CheckpointError, DeploymentError
from sparsebit.llm.models.hub_classes import load_tokenizer
from sparsebit.llm.models.sentencepiece_file import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    is_sentencepiece,
    read_sentencepiece,
)

log = logging.getLogger(__name__)
# llama.cpp's names for the patterns that split text before bytes are merged, of Llama 3, Phi-4 and Qwen, and
# whether a word that is a token needs no merging: only in Llama 3 (`ignore_merges`).
_START = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_NO_SCORE = -1000.0  # of tokens that are not merged
_THREE_DIGITS, _ONE_DIGIT = _START + r"\p{N}{1,3}" + _END, _START + r"\p{N}" + _END
_PATTERNS = {(_THREE_DIGITS, True): "llama-bpe", (_THREE_DIGITS, False): "dbrx", (_ONE_DIGIT, False): "qwen2"}
# Ways to split by a pattern that keep the parts: matches become separate parts, or the text between them is removed.
_KEEPS_PARTS = (("Isolated", False), ("Removed", True))
_UNKNOWN_OPTIONS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
# If the model's name contains this text, llama.cpp removes spaces after all special tokens but three, and does not
# load a vocabulary that lacks one of the three, or </s>.
_REMOVES_SPACE = re.compile(r"(phi)-?(3)", re.IGNORECASE)
_KEEPS_SPACE, _END_TOKEN = {"<unk>", "<s>", "<|endoftext|>"}, {"</s>"}


def add_tokenizer(writer: Any, folder: Path, config: Any) -> None:
    """Add the tokenizer of the model folder to the file, with its special tokens and its chat template.

    Supported are byte-level BPE of tokenizer.json with a way to split text that llama.cpp has a name for, and BPE of
    sentencepiece (tokenizer.model); others are errors.
    """
    path, pieces = folder / "tokenizer.json", folder / "tokenizer.model"
    found = None if not path.is_file() and is_sentencepiece(pieces) else _read(path)
    kinds = [step.get("type") for step in _steps((found or {}).get("pre_tokenizer"))]
    is_bytes = found is not None and found["model"].get("type") == "BPE" and "ByteLevel" in kinds
    if found is not None and not is_bytes and not is_sentencepiece(pieces):
        raise DeploymentError(
            f"{path} is of type {found['model'].get('type')!r}; GGUF files are written for byte-level BPE, and for "
            f"sentencepiece where its {pieces.name} is in the folder: copy that file from the download of the model"
        )
    if found is not None and is_bytes:
        tokens, types = _add_bytes(writer, path, found, config)
        tokenizer = load_tokenizer(folder)
    else:
        tokenizer = load_tokenizer(folder)
        tokens, types = _add_pieces(writer, pieces, tokenizer, config)
    special = {token for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED, UNKNOWN)}
    writer.add_name(name_in_file(folder.name, tokenizer, special))
    _add_use(writer, tokenizer, config)


def name_in_file(name: str, tokenizer: Any, special: set[str]) -> str:
    """The model's name; by it llama.cpp treats a model as Phi-3. `special`: tokens that are not parts of texts."""
    added = tokenizer.added_tokens_decoder.values()
    behind = {entry.content for entry in added if entry.rstrip}
    removes = behind == special - _KEEPS_SPACE and special >= _END_TOKEN | _KEEPS_SPACE
    left = {entry.content for entry in added if entry.lstrip or entry.single_word} | (set() if removes else behind)
    if left:
        log.warning(
            "the tokenizer of %s removes spaces next to some tokens, or finds them as whole words alone (%s), which "
            "llama.cpp does not: write no spaces there",
            *(name, ", ".join(sorted(left)[:8])),
        )
    if removes:
        return name if _REMOVES_SPACE.search(name) else f"phi-3 {name}"
    return _REMOVES_SPACE.sub(r"\1 \2", name)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = found["model"], found["added_tokens"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); GGUF files hold the tokenizer") from None
    return found


def _add_bytes(writer: Any, path: Path, found: dict[str, Any], config: Any) -> tuple[list[str], list[int]]:
    """Byte-level BPE; returns the tokens and their types."""
    model, added = found["model"], found["added_tokens"]
    options = [name for name in _UNKNOWN_OPTIONS if model.get(name)]
    normalizer = (found.get("normalizer") or {}).get("type")
    if options or normalizer not in (None, "NFC"):  # llama.cpp has none; NFC changes hardly any text
        how = f"merges with {', '.join(options)}" if options else f"changes text before it is split ({normalizer})"
        raise DeploymentError(f"{path} {how}, which llama.cpp does not")
    highest = max((*model["vocab"].values(), *(entry["id"] for entry in added)), default=0)
    tokens, types = _unused(highest, path, config)
    for text, number in model["vocab"].items():
        tokens[number], types[number] = text, NORMAL
    for entry in added:
        tokens[entry["id"]], types[entry["id"]] = entry["content"], CONTROL if entry.get("special") else USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    ignores_merges = bool(model.get("ignore_merges"))
    writer.add_tokenizer_pre(_pre(_steps(found.get("pre_tokenizer")), path, ignores_merges=ignores_merges))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    return tokens, types


def _add_pieces(writer: Any, path: Path, tokenizer: Any, config: Any) -> tuple[list[str], list[int]]:
    """BPE of sentencepiece: llama.cpp merges the neighbours whose token has the highest score; returns as above."""
    found = read_sentencepiece(path)
    if found.kind != "bpe" or found.changes_text:
        reason = "changes text before it is split" if found.kind == "bpe" else f"is of kind {found.kind}"
        raise DeploymentError(f"{path} {reason}; GGUF files are written for BPE of sentencepiece that keeps the text")
    added = tokenizer.added_tokens_decoder
    tokens, types = _unused(max(len(found.pieces) - 1, *added, 0), path, config)
    scores = [_NO_SCORE] * config.vocab_size
    for number, piece in enumerate(found.pieces):
        tokens[number], scores[number], types[number] = piece.text, piece.score, piece.type
    for number, entry in added.items():
        if number >= len(found.pieces) or types[number] == NORMAL:
            types[number] = CONTROL if entry.special else USER_DEFINED
        tokens[number] = entry.content
    for number, text in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))):
        if text is not None and text != tokens[number]:
            raise DeploymentError(
                f"{path} has the token {number} as {tokens[number]!r}, and the tokenizer of the folder as {text!r}: "
                "they are of different models"
            )
    first = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False)["input_ids"])[0]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_add_space_prefix(first.startswith("▁"))
    unknown = [number for number, piece in enumerate(found.pieces) if piece.type == UNKNOWN]
    if unknown:
        writer.add_unk_token_id(unknown[0])
    return tokens, types


def _unused(highest: int, path: Path, config: Any) -> tuple[list[str], list[int]]:
    """Texts and types for embeddings that no token has; `highest`: the last token, which needs one."""
    if highest >= config.vocab_size:
        raise DeploymentError(
            f"{path} has the token {highest}, and the model has embeddings for {config.vocab_size} tokens: llama.cpp "
            "reads one for each; remove the added tokens, or resize the embeddings of the float model"
        )
    return [f"[PAD{number}]" for number in range(config.vocab_size)], [UNUSED] * config.vocab_size


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers") or [pre_tokenizer]


def _pre(steps: list[dict[str, Any]], path: Path, *, ignores_merges: bool = False) -> str:
    """llama.cpp's name for how text is split before bytes are merged; `ignores_merges`: words that are tokens stay."""
    *front, last = steps
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space") and len(front) < 2:
        uses_regex, first = last.get("use_regex", True), front[0] if front else {}
        if uses_regex and not ignores_merges and not front:
            return "gpt-2"
        if uses_regex and not ignores_merges and first.get("type") == "Digits" and first.get("individual_digits"):
            return "smollm"
        found = _PATTERNS.get((_pattern(first), ignores_merges))
        if found is not None and not uses_regex:
            return found
    more = " and ignores merges" if ignores_merges else ""
    raise DeploymentError(f"{path} splits text by {steps}{more}, which llama.cpp has no name for that is known here")


def _pattern(step: dict[str, Any]) -> str:
    """The pattern whose matches are the parts; empty if parts are made in another way."""
    how = step.get("behavior", "Isolated"), step.get("invert", False)
    return str(step.get("pattern", {}).get("Regex", "")) if how in _KEEPS_PARTS else ""


def _add_use(writer: Any, tokenizer: Any, config: Any) -> None:
    """Special tokens, whether they are added around a text, and the chat template; without these llama.cpp guesses."""
    special: dict[str, int] = {}
    for name in ("bos", "eos", "pad"):
        value = getattr(tokenizer, f"{name}_token_id", None)
        value = getattr(config, f"{name}_token_id", None) if value is None else value
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int):
            special[name] = value
            getattr(writer, f"add_{name}_token_id")(value)
    text = tokenizer("a")["input_ids"]
    writer.add_add_bos_token("bos" in special and text[:1] == [special["bos"]])
    writer.add_add_eos_token("eos" in special and text[-1:] == [special["eos"]])
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)
