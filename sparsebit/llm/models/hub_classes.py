"""Imports optional packages, and classes of transformers, when they are needed."""

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
_TOKENIZERS = [f"{name}.json" for name in ("tokenizer", "tokenizer_config", "vocab")]
_TOKENIZERS += ["tokenizer.model", "tiktoken.model", "vocab.txt"]
_SAMPLE = "The quick brown fox, 1234 naïve dogs\n  and 日本 🙂."


def package(name: str, extra: str, purpose: str) -> Any:
    """An optional package; without it, an error that names the command to install it."""
    try:
        return __import__(name.replace("-", "_"))
    except Exception:  # a broken package raises anything
        raise MissingExtraError(name, extra, purpose) from None


def transformers_module() -> Any:
    """The package transformers; it never uses the network."""
    return package("transformers", "llm", "a language model")


def auto_class(config: Any) -> Any:
    """The class of transformers that loads a model of this config: of language models, or of those with images."""
    transformers = transformers_module()
    texts, images = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
    sees = getattr(config, "vision_config", None) is not None and type(config) in images._model_mapping
    return images if sees else texts


def need_imported(error: Exception) -> None:
    """Raise for classes of transformers that a broken package makes unimportable: the model is not the cause."""
    if isinstance(error, ImportError) and error.__cause__ is not None:
        raise MissingExtraError("transformers", "llm", "a language model") from error


def load_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The model's config; code that comes with the model runs only if `trust_remote_code` is True."""
    need_folder(folder)
    return _from_pretrained("AutoConfig", folder, "config", trust_remote_code)


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in the folder of the model."""
    need_folder(folder)
    pieces = Path(folder) / "tokenizer.model"
    has_pieces_alone = not (Path(folder) / "tokenizer.json").is_file() and is_sentencepiece(pieces)
    problem = None
    if not any((Path(folder) / name).is_file() for name in _TOKENIZERS):
        problem = f"{folder} has no tokenizer ({', '.join(_TOKENIZERS)}): copy these files from the download"
    elif has_pieces_alone and find_spec("sentencepiece") is None:
        problem = f"{pieces} needs the package 'sentencepiece': pip install sentencepiece; or add the tokenizer.json"
    if problem is not None:
        raise CheckpointError(f"{problem} of the model")
    found = _from_pretrained("AutoTokenizer", folder, "tokenizer", trust_remote_code)
    if has_pieces_alone:
        _compare_pieces(pieces, found)
    return found


def _from_pretrained(kind: str, folder: Path, what: str, trust_remote_code: bool) -> Any:
    auto = getattr(transformers_module(), kind)
    try:
        return auto.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # configs and the package tokenizers raise any kind of exception
        need_imported(error)
        raise CheckpointError(f"{folder}: its {what} cannot be read ({error})") from None


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


def need_folder(folder: Path) -> None:
    """Raise if it is not a folder, because transformers would treat the name as a model on the network."""
    if not Path(folder).is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder of a downloaded model")


def default_dtype(config: Any, device: torch.device | str) -> torch.dtype:
    """The type of activations and float weights: that of the files, but float32 on a CPU, where halves are slow."""
    stored: torch.dtype = getattr(config, "dtype", None) or torch.float32
    return torch.float32 if torch.device(device).type == "cpu" else stored
