"""The tokenizer of a model folder in a GGUF file: byte-level BPE, the kind of Llama 3, Qwen and GPT-2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsebit.errors import CheckpointError, DeploymentError
from sparsebit.llm.hub_classes import load_tokenizer

# llama.cpp's names for the patterns by which text is split before bytes are merged: of Llama 3, and of Qwen.
_START = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {_START + r"\p{N}{1,3}" + _END: "llama-bpe", _START + r"\p{N}" + _END: "qwen2"}


def add_tokenizer(writer: Any, folder: Path, config: Any) -> None:
    """Add the tokenizer of the model folder to the file, with its special tokens and its chat template.

    Refused are other tokenizers than byte-level BPE, and those that split text in a way that llama.cpp has no name for.
    """
    path = folder / "tokenizer.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        model, added = found["model"], found["added_tokens"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); GGUF files hold the tokenizer") from None
    steps = _steps(found.get("pre_tokenizer"))
    if model.get("type") != "BPE" or not any(step.get("type") == "ByteLevel" for step in steps):
        raise DeploymentError(
            f"{path} is of type {model.get('type')!r}; GGUF files are written for byte-level BPE only"
        )
    normalizer = (found.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):  # llama.cpp has none; NFC changes hardly any text
        raise DeploymentError(f"{path} changes text before it is split ({normalizer}), which llama.cpp does not")
    highest = max((*model["vocab"].values(), *(entry["id"] for entry in added)), default=0)
    if highest >= config.vocab_size:
        raise DeploymentError(
            f"{path} has the token {highest}, and the model has embeddings for {config.vocab_size} tokens: llama.cpp "
            "reads one for each; remove the added tokens, or resize the embeddings of the float model"
        )
    tokens = [f"[PAD{number}]" for number in range(config.vocab_size)]
    types = [5] * config.vocab_size  # unused
    for text, number in model["vocab"].items():
        tokens[number], types[number] = text, 1  # normal
    for entry in added:
        tokens[entry["id"]], types[entry["id"]] = entry["content"], 3 if entry.get("special") else 4  # control, own
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre(steps, path))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    _add_use(writer, load_tokenizer(folder), config)


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
