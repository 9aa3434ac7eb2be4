"""The classes of transformers that are needed, imported when they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sparsebit.errors import CheckpointError, MissingExtraError

# A model has one of these files: fast tokenizers, those of sentencepiece and of tiktoken, and those of GPT-2's kind.
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
)


def transformers_module() -> Any:
    """The package transformers; it is never asked to reach the network."""
    try:
        import transformers
    except ImportError:
        raise MissingExtraError("transformers", "llm", "a language model") from None
    return transformers


def load_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The model's config; code that comes with the model runs only if `trust_remote_code` is True."""
    auto = transformers_module().AutoConfig
    _need_folder(folder)
    try:
        return auto.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # the classes of configs raise what they like
        raise CheckpointError(f"{folder}: its config cannot be read ({error})") from None


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer that is kept beside the model."""
    auto = transformers_module().AutoTokenizer
    _need_folder(folder)
    if not any((Path(folder) / name).is_file() for name in _TOKENIZERS):
        raise CheckpointError(
            f"{folder} has no tokenizer ({', '.join(_TOKENIZERS)}): copy these files from the download of the model"
        )
    try:
        return auto.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # the package tokenizers raises nothing more special
        raise CheckpointError(f"{folder}: its tokenizer cannot be read ({error})") from None


def _need_folder(folder: Path) -> None:
    """Transformers would take the name of anything else for a model on the network."""
    if not Path(folder).is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder of a downloaded model")


def default_dtype(config: Any, device: torch.device | str) -> torch.dtype:
    """Of activations and float weights: float32 on a CPU, where half precision is slow, else the type of the files."""
    stored: torch.dtype = getattr(config, "dtype", None) or torch.float32
    return torch.float32 if torch.device(device).type == "cpu" else stored
