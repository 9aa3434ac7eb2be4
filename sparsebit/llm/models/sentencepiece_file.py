"""`SentencePieceFile`: the vocabulary in a `tokenizer.model` of sentencepiece, read without that package.

The file is a protocol buffer (sentencepiece_model.proto of google/sentencepiece): a sequence of numbered fields.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebit.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces, the same numbers as in GGUF
_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
# Fields of the messages ModelProto, SentencePiece, TrainerSpec and NormalizerSpec.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE = 3
_CHARSMAP, _REMOVE_WHITESPACE = 2, 4


@dataclass(frozen=True)
class TokenPiece:
    """A token: its text, in which ▁ is a space, its score (the highest is merged first), and its type."""

    text: str
    score: float
    type: int


@dataclass(frozen=True)
class SentencePieceFile:
    """`kind`: "bpe", "unigram", "word" or "char". `changes_text`: characters are replaced, or spaces removed, first."""

    pieces: tuple[TokenPiece, ...]
    kind: str
    changes_text: bool


def is_sentencepiece(path: Path) -> bool:
    """Whether the file begins like those of sentencepiece; a `tokenizer.model` of tiktoken is lines of base64."""
    try:
        with path.open("rb") as file:
            return file.read(1) == bytes([_PIECES << 3 | 2])
    except OSError:
        return False


def read_sentencepiece(path: Path) -> SentencePieceFile:
    """The vocabulary of the file."""
    pieces: tuple[TokenPiece, ...] = ()
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = tuple(
            TokenPiece(found.get(_TEXT, b"").decode(), found.get(_SCORE, 0.0), found.get(_TYPE, NORMAL))
            for found in (dict(_fields(value)) for number, value in fields if number == _PIECES)
        )
        trainer, normalizer = (
            dict(_fields(b"".join(value for number, value in fields if number == wanted)))
            for wanted in (_TRAINER, _NORMALIZER)
        )
        # The settings come after the tokens.
        problem = "" if pieces and trainer else "tokens or settings are missing"
    except (OSError, ValueError, IndexError, TypeError, struct.error) as error:
        problem = repr(error)
    if problem:
        raise CheckpointError(f"{path} cannot be read ({problem}); is it a file of sentencepiece?")
    changes = bool(normalizer.get(_CHARSMAP)) or bool(normalizer.get(_REMOVE_WHITESPACE, 1))
    kind = trainer.get(_MODEL_TYPE, 1)
    return SentencePieceFile(pieces, _KINDS.get(kind, str(kind)), changes)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: whole numbers, floats, and bytes (texts and inner messages)."""
    place = 0
    value: Any
    while place < len(data):
        tag, place = _whole(data, place)
        kind = tag & 7
        if kind == 0:
            value, place = _whole(data, place)
        elif kind == 1:
            value, place = struct.unpack_from("<d", data, place)[0], place + 8
        elif kind == 2:
            size, place = _whole(data, place)
            value, place = data[place : place + size], place + size
            if place > len(data):
                raise ValueError("it is cut off")
        elif kind == 5:
            value, place = struct.unpack_from("<f", data, place)[0], place + 4
        else:
            raise ValueError(f"a field of kind {kind} at byte {place}")
        yield tag >> 3, value


def _whole(data: bytes, place: int) -> tuple[int, int]:
    """A whole number in groups of 7 bits, and the place after it."""
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, place
