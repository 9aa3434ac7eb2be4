"""The tokenizer of a model folder in a GGUF file: byte-level BPE, the kind of Llama 3, Qwen and GPT-2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsebit.errors import CheckpointError, DeploymentError


def add_tokenizer(writer: Any, folder: Path, pre: str | None, vocab_size: int) -> None:
    """Add the tokenizer of the model folder to the file. `pre`: llama.cpp's name for how its architecture splits text.

    `pre` is None where tokenizer.json itself tells. Other tokenizers than byte-level BPE are refused.
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
    highest = max((*model["vocab"].values(), *(entry["id"] for entry in added)), default=0)
    if highest >= vocab_size:
        raise DeploymentError(
            f"{path} has the token {highest}, and the model has embeddings for {vocab_size} tokens: llama.cpp reads "
            "one for each; remove the added tokens, or resize the embeddings of the float model"
        )
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [5] * vocab_size  # unused
    for text, number in model["vocab"].items():
        tokens[number], types[number] = text, 1  # normal
    for entry in added:
        tokens[entry["id"]], types[entry["id"]] = entry["content"], 3 if entry.get("special") else 4  # control, own
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre(steps, pre, path))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    for name, number in _special_tokens(folder).items():
        getattr(writer, f"add_{name}")(number)


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    steps: list[dict[str, Any]] = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    return steps


def _pre(steps: list[dict[str, Any]], known: str | None, path: Path) -> str:
    """llama.cpp's name for how text is split before bytes are merged."""
    patterns = [step["pattern"].get("Regex", "") for step in steps if step.get("type") == "Split"]
    if not patterns and any(step.get("type") == "ByteLevel" and step.get("use_regex", True) for step in steps):
        return "gpt-2"
    if known is not None:
        return known
    if any(r"\p{N}{1,3}" in pattern for pattern in patterns):
        return "llama-bpe"
    raise DeploymentError(f"{path} splits text by {patterns}, which llama.cpp has no name for that is known here")


def _special_tokens(folder: Path) -> dict[str, int]:
    """The ids of the tokens at the beginning and the end, from the config."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found: dict[str, int] = {}
    for name in ("bos", "eos", "pad"):
        value = config.get(f"{name}_token_id")
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int):
            found[f"{name}_token_id"] = value
    return found
