"""Texts of options -> values."""

from __future__ import annotations

import pytest
import typer

from sparsebit.cli.options import (
    Arguments,
    Numbers,
    Size,
    read_arguments,
    read_bits,
    read_mean,
    read_names,
    read_size,
    read_std,
)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("{}", Arguments()),
        ('{"num_classes": 10}', Arguments((), {"num_classes": 10})),
        ('["resnet18", 1]', Arguments(("resnet18", 1))),
    ],
    ids=["nothing", "keywords", "positional"],
)
def test_arguments(text: str, arguments: Arguments) -> None:
    assert read_arguments(text) == arguments


@pytest.mark.parametrize(("text", "size"), [("224", Size(224, 224)), ("192x320", Size(192, 320)), ("8X4", Size(8, 4))])
def test_size(text: str, size: Size) -> None:
    assert read_size(text) == size


def test_numbers() -> None:
    assert read_mean("0.5") == Numbers([0.5])
    assert read_std("0.229, 0.224,0.225") == Numbers([0.229, 0.224, 0.225])


def test_names() -> None:
    assert read_names("ids, mask") == ("ids", "mask")


def test_bits_once_each() -> None:
    assert read_bits("8, 4,8") == (8, 4)


@pytest.mark.parametrize(
    ("read", "text", "advice"),
    [
        (read_arguments, "num_classes=10", "not valid JSON"),
        (read_arguments, "10", "neither a JSON object"),
        (read_size, "0", "192x320"),
        (read_size, "99999999", "16,384 pixels a side"),
        (read_size, "224x16385", "16,384 pixels a side"),
        (read_size, "big", "192x320"),
        (read_mean, "0.1,0.2", "one number, or three"),
        (read_mean, "a", "one number, or three"),
        (read_mean, "123.675,116.28,103.53", r"divide by 255: 0\.485,0\.456,0\.406"),
        (read_std, "58.395", r"divide by 255: 0\.229"),
        (read_std, "0", "above 0"),
        (read_bits, "0", "1 to 16"),
        (read_bits, "8;4", "with commas"),
        (read_names, "ids,,mask", "names that differ"),
        (read_names, "ids,ids", "names that differ"),
    ],
)
def test_nonsense_is_a_usage_error(read: object, text: str, advice: str) -> None:
    assert callable(read)
    with pytest.raises(typer.BadParameter, match=advice):
        read(text)
