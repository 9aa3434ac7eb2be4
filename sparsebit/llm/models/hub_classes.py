"""Imports classes of transformers when they are needed."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sparsebit.errors import CheckpointError, MissingExtraError
from sparsebit.llm.models.sentencepiece_file import is_sentencepiece

log = logging.getLogger(__name__)
# A model has one of these files: fast tokenizers, those of sentencepiece and of tiktoken, and those of GPT-2's kind.
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
)
_SAMPLE = "The quick brown fox, 1234 naïve dogs\n  and 日本 🙂."


def transformers_module() -> Any:
    """The package transformers; it never uses the network."""
    try:
        import transformers
    except Exception:  # a broken package raises anything
        raise MissingExtraError("transformers", "llm", "a language model") from None
    return transformers


def need_imported(error: Exception) -> None:
    """Raise for classes of transformers that a broken package makes unimportable: the model is not the cause."""
    if isinstance(error, ImportError) and error.__cause__ is not None:
        raise MissingExtraError("transformers", "llm", "a language model") from error


def load_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The model's config; code that comes with the model runs only if `trust_remote_code` is True."""
    auto = transformers_module().AutoConfig
    _need_folder(folder)
    try:
        return auto.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # the classes of configs raise any kind of exception
        need_imported(error)
        raise CheckpointError(f"{folder}: its config cannot be read ({error})") from None


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in the folder of the model."""
    auto = transformers_module().AutoTokenizer
    _need_folder(folder)
    if not any((Path(folder) / name).is_file() for name in _TOKENIZERS):
        raise CheckpointError(
            f"{folder} has no tokenizer ({', '.join(_TOKENIZERS)}): copy these files from the download of the model"
        )
    pieces = Path(folder) / "tokenizer.model"
    has_pieces_alone = not (Path(folder) / "tokenizer.json").is_file() and is_sentencepiece(pieces)
    if has_pieces_alone and find_spec("sentencepiece") is None:
        raise CheckpointError(
            f"{pieces} needs the package 'sentencepiece', which is not installed: pip install sentencepiece; or add "
            "the tokenizer.json of the model"
        )
    try:
        found = auto.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # the package tokenizers raises no special class
        need_imported(error)
        raise CheckpointError(f"{folder}: its tokenizer cannot be read ({error})") from None
    if has_pieces_alone:
        _compare_pieces(pieces, found)
    return found


def _compare_pieces(path: Path, tokenizer: Any) -> None:
    """Warn if the tokenizer that transformers makes from the file has other tokens than sentencepiece itself."""
    from sentencepiece import SentencePieceProcessor

    try:
        expected = SentencePieceProcessor(model_file=str(path)).encode(_SAMPLE)
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); copy it again from the download") from None
    found = tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"]
    if found != expected:
        log.warning(
            "%s: transformers makes other tokens than sentencepiece of %r; if the model was not trained so, copy its "
            "tokenizer_config.json or tokenizer.json into the folder",
            *(path, _SAMPLE),
        )


def _need_folder(folder: Path) -> None:
    """Raise if it is not a folder, because transformers would treat the name as a model on the network."""
    if not Path(folder).is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder of a downloaded model")


def default_dtype(config: Any, device: torch.device | str) -> torch.dtype:
    """The type of activations and float weights: that of the files, except float32 on a CPU (half precision is
    slow).
    """
    stored: torch.dtype = getattr(config, "dtype", None) or torch.float32
    return torch.float32 if torch.device(device).type == "cpu" else stored
