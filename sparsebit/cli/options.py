"""The values of options and how they are read from text; a value that cannot be used is a usage error."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

import typer

LARGEST_SIDE = 16_384  # pixels


class Arguments(NamedTuple):
    """The arguments of a factory call."""

    positional: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}  # noqa: RUF012  (a NamedTuple's default; never written to)

    def __bool__(self) -> bool:
        return bool(self.positional or self.keywords)


class Size(NamedTuple):
    """Pixels."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


class Numbers(tuple[float, ...]):
    """One number for all channels, or one for each."""


class Names(tuple[str, ...]):
    """Names of inputs or outputs, in order."""


def read_arguments(text: str) -> Arguments:
    """`["resnet18"]` or `{"num_classes": 10}`."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(
            f"not valid JSON ({error}); write '{{\"num_classes\": 10}}' or '[\"resnet18\"]'"
        ) from None
    if isinstance(value, list):
        return Arguments(tuple(value))
    if isinstance(value, dict):
        return Arguments((), value)
    raise typer.BadParameter(
        f"{text} is neither a JSON object (keyword arguments) nor a JSON list (positional arguments)"
    )


def as_typed(value: Any) -> str:
    """The text from which an option's value is read."""
    if isinstance(value, Arguments):
        return json.dumps(value.keywords or value.positional)
    return ",".join(map(str, value)) if isinstance(value, Numbers | Names) else str(value)


def read_size(text: str) -> Size:
    """`224`, or `192x320` (height x width)."""
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text.strip().lower())
    if not match:
        raise typer.BadParameter(f"{text!r} is not a size in pixels; write 224, or 192x320 (height x width)")
    size = Size(int(match[1]), int(match[2] or match[1]))
    if max(size) > LARGEST_SIDE:
        raise typer.BadParameter(f"{text}: more than {LARGEST_SIDE:,} pixels a side; write what the model takes: 224")
    return size


def read_mean(text: str) -> Numbers:
    numbers = _read_numbers(text)
    if any(number > 1 for number in numbers):
        raise typer.BadParameter(f"{text}: pixels count from 0 to 1 here; divide by 255: {_shrunk(numbers)}")
    return numbers


def read_std(text: str) -> Numbers:
    numbers = _read_numbers(text)
    if any(number <= 0 for number in numbers):
        raise typer.BadParameter(f"{text}: a standard deviation is above 0")
    if any(number > 2 for number in numbers):
        raise typer.BadParameter(f"{text}: pixels count from 0 to 1 here; divide by 255: {_shrunk(numbers)}")
    return numbers


def read_bits(text: str) -> tuple[int, ...]:
    """`8,4,2`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 1 <= int(part) <= 16 for part in parts):
        raise typer.BadParameter(
            f"{text!r} is not a list of bit-widths; write numbers from 1 to 16 with commas: 8,6,4,3"
        )
    return tuple(dict.fromkeys(map(int, parts)))


def read_names(text: str) -> Names:
    """`ids,mask`."""
    names = Names(part.strip() for part in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise typer.BadParameter(f"{text!r}: write names that differ, with commas: ids,mask")
    return names


def _read_numbers(text: str) -> Numbers:
    try:
        numbers = Numbers(float(part) for part in text.split(","))
    except ValueError:
        numbers = Numbers()
    if len(numbers) not in (1, 3):
        raise typer.BadParameter(f"{text!r}: write one number, or three with commas: 0.485,0.456,0.406")
    return numbers


def _shrunk(numbers: Numbers) -> str:
    return ",".join(f"{number / 255:.4g}" for number in numbers)


def finite_decibels(value: float | None) -> float | None:
    """The value, unless it is infinite or NaN."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value}: write a number of decibels, or --exact where no bit may differ")
    return value
