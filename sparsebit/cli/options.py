"""The values of options and how they are read from text; a value that cannot be used is a usage error."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import typer

LARGEST_SIDE = 16_384  # pixels


def refuse(faults: Mapping[str, object], option: str | None = None) -> None:
    """Raise a usage error for the first text whose condition holds. `option`: the option that it is about."""
    for text, holds in faults.items():
        if holds:
            raise typer.BadParameter(text, param_hint=option)


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
        raise typer.BadParameter(f"not valid JSON ({error}); {_JSON}") from None
    if not isinstance(value, (list, dict)):
        raise typer.BadParameter(f"{text} is neither a JSON object (keyword arguments) nor a JSON list; {_JSON}")
    return Arguments(tuple(value)) if isinstance(value, list) else Arguments((), value)


_JSON = "write '{\"num_classes\": 10}' or '[\"resnet18\"]'"


def as_typed(value: Any) -> str:
    """The text from which an option's value is read."""
    if isinstance(value, Arguments):
        return json.dumps(value.keywords or value.positional)
    return ",".join(map(str, value)) if isinstance(value, Numbers | Names) else str(value)


def read_size(text: str) -> Size:
    """`224`, or `192x320` (height x width)."""
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text.strip().lower())
    size = Size(int(match[1]), int(match[2] or match[1])) if match else Size(0, 0)
    refuse(
        {
            f"{text!r} is not a size in pixels; write 224, or 192x320 (height x width)": not match,
            f"{text}: more than {LARGEST_SIDE:,} pixels a side; write what the model takes: 224": max(size)
            > LARGEST_SIDE,
        }
    )
    return size


def read_mean(text: str) -> Numbers:
    return _read_numbers(text, most=1)


def read_std(text: str) -> Numbers:
    numbers = _read_numbers(text, most=2)
    refuse({f"{text}: a standard deviation is above 0": any(number <= 0 for number in numbers)})
    return numbers


def read_bits(text: str) -> tuple[int, ...]:
    """`8,4,2`."""
    parts = [part.strip() for part in text.split(",")]
    is_wrong = not all(part.isdigit() and 1 <= int(part) <= 16 for part in parts)
    refuse({f"{text!r} is not a list of bit-widths; write numbers from 1 to 16 with commas: 8,6,4,3": is_wrong})
    return tuple(dict.fromkeys(map(int, parts)))


def read_names(text: str) -> Names:
    """`ids,mask`."""
    names = Names(part.strip() for part in text.split(","))
    is_wrong = not all(names) or len(set(names)) < len(names)
    refuse({f"{text!r}: write names that differ, with commas: ids,mask": is_wrong})
    return names


def _read_numbers(text: str, *, most: int) -> Numbers:
    try:
        numbers = Numbers(float(part) for part in text.split(","))
    except ValueError:
        numbers = Numbers()
    refuse({f"{text!r}: write one number, or three with commas: 0.485,0.456,0.406": len(numbers) not in (1, 3)})
    shrunk = ",".join(f"{number / 255:.4g}" for number in numbers)
    refuse({f"{text}: pixels count from 0 to 1 here; divide by 255: {shrunk}": any(one > most for one in numbers)})
    return numbers


def finite_decibels(value: float | None) -> float | None:
    """The value, unless it is infinite or NaN."""
    is_wrong = value is not None and not math.isfinite(value)
    refuse({f"{value}: write a number of decibels, or --exact where no bit may differ": is_wrong})
    return value


def read_limits(texts: list[str]) -> dict[str, float | str]:
    """`["bytes=0.5"]` as a mapping; the limits may have units."""
    pairs = [text.partition("=") for text in texts]
    refuse({f"{text!r}: write NAME=LIMIT, as bytes=0.5": "=" not in text for text in texts}, "--budget")
    names = [name.strip() for name, _, _ in pairs]
    refuse({f"{name} is given twice; give one limit": names.count(name) > 1 for name in names}, "--budget")
    return dict(zip(names, (limit.strip() for _, _, limit in pairs), strict=True))
