"""The classes of transformers that are needed, imported when they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsebit.errors import CheckpointError, MissingExtraError


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
    try:
        return auto.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: its config cannot be read ({error})") from None


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer that is kept beside the model."""
    auto = transformers_module().AutoTokenizer
    try:
        return auto.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: its tokenizer cannot be read ({error})") from None
