from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings

from sparsebit.errors import RecordError
from sparsebit.records import RunRecord
from sparsebit.records.run_record import VERSION
from tests.records.examples import FILE, MODEL, RECORD
from tests.records.random_records import RECORDS


def test_round_trip() -> None:
    again = RunRecord.from_json(RECORD.to_json())
    assert again == RECORD and again.output is not None and again.output.sqnr_db == math.inf


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(record=RECORDS)
def test_round_trip_of_any_record(record: RunRecord) -> None:
    assert RunRecord.from_json(record.to_json()) == record


def test_what_did_not_run_is_absent() -> None:
    assert RunRecord(model=MODEL).to_dict().keys() == {"format", "version", "model"}
    assert RunRecord(model=MODEL).sections == ("model",)
    assert RunRecord.from_json(RunRecord().to_json()) == RunRecord()


def test_it_is_strict_json() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    values = json.loads(RECORD.to_json(), parse_constant=refuse)
    assert values["output"] == {"sqnr_db": "Infinity", "num_samples": 32} and values["version"] == VERSION


def test_not_a_number_is_kept() -> None:
    record = RECORD.replace(output=dataclasses.replace(RECORD.output, sqnr_db=math.nan))  # type: ignore[type-var]
    again = RunRecord.from_json(record.to_json())
    assert again.output is not None and math.isnan(again.output.sqnr_db)


def test_frozen_and_replaced() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECORD.file = None  # type: ignore[misc]
    assert RECORD.replace(file=None).file is None and RECORD.file is FILE
    with pytest.raises(ValueError, match="version"):
        RECORD.replace(version=2)


def test_one_from_the_future() -> None:
    values = RECORD.to_dict() | {"version": VERSION + 1, "novelty": {}}
    with pytest.raises(RecordError, match=rf"r.json has version {VERSION + 1}, of a newer Sparsebit.*up to {VERSION}"):
        RunRecord.from_json(json.dumps(values), "r.json")


@pytest.mark.parametrize("version", [None, "1", 0, -1, True, 1.0], ids=repr)
def test_versions_that_are_none(version: object) -> None:
    with pytest.raises(RecordError, match="damaged: version"):
        RunRecord.from_dict(RECORD.to_dict() | {"version": version})


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", "7", '"sparsebit-record"', "{}", '{"format": "sparsebit-quantized"}', RECORD.to_json()[:-9],
], ids=["empty", "cut", "list", "null", "number", "text", "object", "checkpoint", "torn"])  # fmt: skip
def test_files_that_are_none(text: str) -> None:
    with pytest.raises(RecordError, match=r"^r\.json is (damaged|not a Sparsebit record)"):
        RunRecord.from_json(text, "r.json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["modell"], {}, r"record\.modell: unknown key; did you mean model\?"),
        (["model", "colour"], "red", r"record\.model\.colour: unknown key; known keys: name,"),
        (["model", "name"], 7, r"record\.model\.name: 7 is not a text"),
        (["model", "num_parameters"], 7.5, r"record\.model\.num_parameters: 7\.5 is not a whole number"),
        (["model", "num_parameters"], True, r"record\.model\.num_parameters: True is not a whole number"),
        (["calibration", "asym"], 1, r"record\.calibration\.asym: 1 is not true or false"),
        (["output", "sqnr_db"], "loud", r"record\.output\.sqnr_db: 'loud' is not a number"),
        (["output", "sqnr_db"], None, r"record\.output\.sqnr_db: None is not a number"),
        (["output", "sqnr_db"], 10**400, r"record\.output\.sqnr_db: 10+\.\.\. is not a number"),
        (["errors"], {}, r"record\.errors: \{\} is not a list"),
        (["errors", 0, "sites", 0, "target"], "feature", r"sites\[0\]\.target: 'feature' is not 'weight' or"),
        (["errors", 0, "sites", 0, "target"], [], r"sites\[0\]\.target: \[\] is not 'weight' or"),
        (["errors", 0, "layers", 0], "fc", r"record\.errors\[0\]\.layers\[0\]: 'fc' is not an object"),
        (["runs", 0, "phases"], [], r"record\.runs\[0\]\.phases: \[\] is not an object"),
        (["runs", 0, "made"], ["house"], r"made\[0\]: 'house' is not 'model' or 'file'"),
    ],
)
def test_wrong_parts_are_named(path: list[str | int], value: object, message: str) -> None:
    values = json.loads(RECORD.to_json())
    part = values
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(RecordError, match=message):
        RunRecord.from_dict(values)


def test_a_missing_part_is_named() -> None:
    values = RECORD.to_dict()
    del values["model"]["architecture"]
    with pytest.raises(RecordError, match=r"record\.model\.architecture is missing"):
        RunRecord.from_dict(values)


@pytest.mark.parametrize("text", ['"model": null, "model": null', '"output": {"sqnr_db": NaN, "num_samples": 1}'])
def test_json_that_other_readers_read_otherwise(text: str) -> None:
    with pytest.raises(RecordError, match="damaged"):
        RunRecord.from_json(f'{{"format": "sparsebit-record", "version": 1, {text}}}')


def test_deeply_nested_file() -> None:
    with pytest.raises(RecordError, match="damaged"):
        RunRecord.from_json('{"format": "sparsebit-record", "version": 1, "config": ' + "[" * 100_000)


@pytest.mark.parametrize("value", [math.inf, math.nan, object()], ids=["inf", "nan", "object"])
def test_a_config_that_json_would_not_give_back(value: object) -> None:
    with pytest.raises(RecordError, match=r"record\.config\.W\.SCALE: .* cannot be written to JSON"):
        RunRecord(config={"W": {"SCALE": value}}).to_json()


def test_lists_of_numbers_take_one_line() -> None:
    record = RECORD.replace(config={"text": "[\n 1,\n 2\n]", "list": [[1, -2.5e-9], [], [3]]})
    assert '"counts": [1, 2, 3]' in record.to_json() and '"text": "[\\n 1,\\n 2\\n]"' in record.to_json()
    assert RunRecord.from_json(record.to_json()) == record
