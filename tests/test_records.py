from __future__ import annotations

import dataclasses
import json

import pytest

from sparsebit.records import Coverage, FloatLayer, LayerError, OpaqueModule, QuantizedLayer

COVERAGE = Coverage(
    (QuantizedLayer("conv", "QConv2d", {"input": "uint8"}),),
    (FloatLayer("erf", "unknown op"),),
    (OpaqueModule("", "Net", "branches", "net.py:3: if x:", ()),),
    ("a note",),
    num_weighted=4,
    num_weighted_quantized=1,
)


def test_coverage_as_text() -> None:
    assert str(COVERAGE).splitlines() == [
        "1 of 4 weighted layers quantized, 1 layers in all",
        "  float    erf: unknown op",
        "  untraced (model) [Net]: branches",
        "           at net.py:3: if x:",
        "           quantized inside: nothing",
        "  note     a note",
    ]


def test_coverage_as_json() -> None:
    values = json.loads(json.dumps(COVERAGE.to_dict()))
    assert values["weighted_fraction"] == 0.25 and values["quantized"][0]["sites"] == {"input": "uint8"}


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LayerError("conv", 0.1, 30.0).error = 0.2  # type: ignore[misc]
