from __future__ import annotations

import json
import math

import pytest

from sparsebit.records.error_profile import ValueHistogram
from sparsebit.report.page_data import (
    HEIGHTS,
    Card,
    Run,
    Tensor,
    bins,
    decibels,
    levels,
    number_of_bits,
    plain,
    quantity,
)


def test_plain_leaves_out_what_is_absent_and_keeps_falsehoods() -> None:
    run = Run("a", "model", cards=(Card("x", "1", share=0.0, is_good=False),), met=False)
    assert plain(run) == {
        "name": "a",
        "kind": "model",
        "met": False,
        "cost_name": "bytes",
        "cards": [{"label": "x", "value": "1", "share": 0, "is_good": False}],
    }


def test_numbers_have_four_digits_and_are_json() -> None:
    assert plain((1.23456789, 123456.789, math.inf, math.nan, 3.0)) == [1.235, 123500, None, None, 3]
    json.dumps(plain((1e-300, -0.0)), allow_nan=False)


def test_heights_are_square_roots_and_one_value_is_seen() -> None:
    found = bins(ValueHistogram(0.0, 1.0, (0, 1, 2500, 10000)))
    assert found is not None and [HEIGHTS.index(char) for char in found.heights] == [0, 1, 32, 63]
    assert bins(None) is None and bins(ValueHistogram(0.0, 1.0, ())) is None


def test_sorted_values_keep_their_ends_and_their_shape() -> None:
    found = levels((0.0, 0.5, 2.0))
    assert found is not None and (found.low, found.high) == (0.0, 2.0)
    assert [HEIGHTS.index(char) for char in found.heights] == [0, 16, 63]
    assert levels((1.0,)) is None and plain(Tensor("weight", "int8", scales=(0.1,))) == {
        "role": "weight",
        "format": "int8",
    }
    assert plain(Tensor("weight", "int8", peaks=(1.0, 4.0)))["peaks"] == {"low": 1, "high": 4, "heights": "Q_"}


@pytest.mark.parametrize(("kind", "bits"), [("uint8", 8), ("int4", 4), ("float8_e4m3", 8), ("strange", None)])
def test_bits_of_a_format(kind: str, bits: int | None) -> None:
    assert number_of_bits(kind) == bits


def test_decibels_are_finite() -> None:
    assert decibels(math.inf) == 999.0 and decibels(-math.inf) is None and decibels(math.nan) is None
    assert decibels(30.0) == 30.0


def test_quantity() -> None:
    assert [quantity(value) for value in (12, 999.9, 4.2e6, 5e12)] == ["12 B", "1 kB", "4.2 MB", "5e+03 GB"]
    assert quantity(1500, ("", "k")) == "1.5 k" and quantity(12, ("", "k")) == "12"
