"""The tokenizer of a model folder in a GGUF file: byte-level BPE (Llama 3, Qwen, GPT-2), or sentencepiece (Llama 2)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsebit.errors import CheckpointError, DeploymentError
from sparsebit.llm.hub_classes import load_tokenizer
from sparsebit.llm.sentencepiece_file import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    is_sentencepiece,
    read_sentencepiece,
)

# llama.cpp's names for the patterns by which text is split before bytes are merged: of Llama 3, and of Qwen.
_START = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_NO_SCORE = -1000.0  # of tokens that are not merged
_PATTERNS = {_START + r"\p{N}{1,3}" + _END: "llama-bpe", _START + r"\p{N}" + _END: "qwen2"}


def add_tokenizer(writer: Any, folder: Path, config: Any) -> None:
    """Add the tokenizer of the model folder to the file, with its special tokens and its chat template.

    Written are byte-level BPE of tokenizer.json that splits text in a way that llama.cpp has a name for, and BPE of
    sentencepiece (tokenizer.model); others are refused.
    """
    path, pieces = folder / "tokenizer.json", folder / "tokenizer.model"
    found = None if not path.is_file() and is_sentencepiece(pieces) else _read(path)
    if found is not None and _is_byte_level(found):
        _add_bytes(writer, path, found, config)
        _add_use(writer, load_tokenizer(folder), config)
        return
    if found is not None and not is_sentencepiece(pieces):
        raise DeploymentError(
            f"{path} is of type {found['model'].get('type')!r}; GGUF files are written for byte-level BPE, and for "
            f"sentencepiece where its {pieces.name} is in the folder: copy that file from the download of the model"
        )
    tokenizer = load_tokenizer(folder)
    _add_pieces(writer, pieces, tokenizer, config)
    _add_use(writer, tokenizer, config)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = found["model"], found["added_tokens"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); GGUF files hold the tokenizer") from None
    return found


def _is_byte_level(found: dict[str, Any]) -> bool:
    steps = _steps(found.get("pre_tokenizer"))
    return found["model"].get("type") == "BPE" and any(step.get("type") == "ByteLevel" for step in steps)


def _add_bytes(writer: Any, path: Path, found: dict[str, Any], config: Any) -> None:
    """Byte-level BPE."""
    model, added = found["model"], found["added_tokens"]
    normalizer = (found.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):  # llama.cpp has none; NFC changes hardly any text
        raise DeploymentError(f"{path} changes text before it is split ({normalizer}), which llama.cpp does not")
    highest = max((*model["vocab"].values(), *(entry["id"] for entry in added)), default=0)
    _need_embedding(highest, path, config)
    tokens, types = _unused(config)
    for text, number in model["vocab"].items():
        tokens[number], types[number] = text, NORMAL
    for entry in added:
        tokens[entry["id"]], types[entry["id"]] = entry["content"], CONTROL if entry.get("special") else USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre(_steps(found.get("pre_tokenizer")), path))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])


def _add_pieces(writer: Any, path: Path, tokenizer: Any, config: Any) -> None:
    """BPE of sentencepiece: llama.cpp merges the neighbours whose token has the highest score."""
    found = read_sentencepiece(path)
    if found.kind != "bpe" or found.changes_text:
        reason = "changes text before it is split" if found.kind == "bpe" else f"is of kind {found.kind}"
        raise DeploymentError(f"{path} {reason}; GGUF files are written for BPE of sentencepiece that keeps the text")
    tokens, types = _unused(config)
    scores = [_NO_SCORE] * config.vocab_size
    added = tokenizer.added_tokens_decoder
    _need_embedding(max(len(found.pieces) - 1, *added, 0), path, config)
    for number, piece in enumerate(found.pieces):
        tokens[number], scores[number], types[number] = piece.text, piece.score, piece.type
    for number, entry in added.items():
        if number >= len(found.pieces) or types[number] == NORMAL:
            types[number] = CONTROL if entry.special else USER_DEFINED
        tokens[number] = entry.content
    known = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    for number, text in enumerate(known):
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


def _unused(config: Any) -> tuple[list[str], list[int]]:
    """Texts and types for embeddings that no token has."""
    return [f"[PAD{number}]" for number in range(config.vocab_size)], [UNUSED] * config.vocab_size


def _need_embedding(highest: int, path: Path, config: Any) -> None:
    if highest >= config.vocab_size:
        raise DeploymentError(
            f"{path} has the token {highest}, and the model has embeddings for {config.vocab_size} tokens: llama.cpp "
            "reads one for each; remove the added tokens, or resize the embeddings of the float model"
        )


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    steps: list[dict[str, Any]] = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    return steps


def _pre(steps: list[dict[str, Any]], path: Path) -> str:
    """llama.cpp's name for how text is split before bytes are merged."""
    *front, last = steps
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        splits_words = last.get("use_regex", True)
        if not front and splits_words:
            return "gpt-2"
        if len(front) == 1 and splits_words and front[0].get("type") == "Digits" and front[0].get("individual_digits"):
            return "smollm"
        pattern = front[0].get("pattern", {}).get("Regex") if len(front) == 1 else None
        if pattern in _PATTERNS and not splits_words:
            return _PATTERNS[pattern]
    raise DeploymentError(f"{path} splits text by {steps}, which llama.cpp has no name for that is known here")


def _add_use(writer: Any, tokenizer: Any, config: Any) -> None:
    """Special tokens, whether they are put around a text, and the chat template; without these llama.cpp guesses."""
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
