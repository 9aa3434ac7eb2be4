from __future__ import annotations

import dataclasses
import json

import pytest

from sparsebit.records import Coverage, FloatLayer, LayerError, OpaqueModule, ParameterRecord, QuantizedLayer

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


def test_coverage_counts_parameters_and_names_sizeable_ones() -> None:
    records = (
        ParameterRecord("layers.0.w", 600, "int8", 2400, 640),
        *(ParameterRecord(f"layers.{i}.experts", 190, "float32", 760, 760, "a reason") for i in range(2)),
        ParameterRecord("a", 11, "float32", 44, 44, "another"),
        ParameterRecord("norm", 9, "float32", 36, 36, "too small to name"),
    )
    coverage = dataclasses.replace(COVERAGE, parameters=records)
    assert coverage.num_parameters == 1000 and coverage.parameter_fraction == 0.6
    assert str(coverage).splitlines()[1:4] == [
        "  weights  60.0 % of 1,000 parameters quantized, 40.0 % float; 4.0 kB in float, 2.2 kB quantized",
        "  float    38.0 % of parameters: layers.*.experts: a reason",
        "  float    1.1 % of parameters: a: another",
    ]
    values = json.loads(json.dumps(coverage.to_dict()))
    assert values["num_parameters"] == 1000 and values["parameters"][1]["reason"] == "a reason"


def test_coverage_as_json() -> None:
    values = json.loads(json.dumps(COVERAGE.to_dict()))
    assert values["weighted_fraction"] == 0.25 and values["quantized"][0]["sites"] == {"input": "uint8"}


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LayerError("conv", 0.1, 30.0).error = 0.2  # type: ignore[misc]
