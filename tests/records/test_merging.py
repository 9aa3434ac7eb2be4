from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from sparsebit.errors import RecordError
from sparsebit.records import FileFacts, RunRecord
from sparsebit.records.audit import Latency
from sparsebit.records.merging import merged
from sparsebit.records.scores import ModelScore, ScoreFacts
from tests.records.examples import FILE, MODEL, RECORD, audit, parity, profile, run
from tests.records.random_records import RECORDS

OTHER_NUMBERS = dataclasses.replace(MODEL, numbers="others")
OTHER_FILE = FileFacts("new.onnx", "cd34", 90)


def test_new_sections_are_added() -> None:
    first = RunRecord(model=MODEL, config={"BACKEND": "virtual"}, runs=(run(),))
    second = RunRecord(model=MODEL, errors=(profile(),), runs=(run("profile"),))
    record, dropped = merged(first, second)
    assert record == first.replace(errors=(profile(),), runs=(*first.runs, *second.runs)) and not dropped


def test_newer_ones_of_the_same_kind_replace_older_ones() -> None:
    new = RunRecord(
        model=MODEL,
        errors=(profile(sqnr_db=20.0), profile(sync=True)),
        file=FILE,
        parity=(parity("float.onnx"), parity()),
        audits=(audit(num_threads=2), audit("openvino")),
    )
    record, _ = merged(RECORD, new)
    assert record.errors == (profile(sqnr_db=20.0), profile(sync=True))
    assert [one.parity.against for one in record.parity] == ["the simulation", "float.onnx"]
    assert [(one.runtime, one.num_threads) for one in record.audits] == [
        ("onnxruntime", 1),
        ("onnxruntime", 2),
        ("openvino", 1),
    ]


def test_accuracy_goes_with_the_file_that_was_scored() -> None:
    scored = RECORD.replace(accuracy=ScoreFacts("top-1", "%", (ModelScore("float", 92.0), ModelScore("file", 91.0))))
    new = RunRecord(model=MODEL, file=OTHER_FILE, runs=(run("export", made=("file",)),))
    record, dropped = merged(scored, new)
    assert record.accuracy is None and "accuracy" in dropped
    record, dropped = merged(scored.replace(file=None, parity=(), audits=()), new)
    assert record.accuracy == scored.accuracy and not dropped


def test_a_look_at_the_file_keeps_what_is_known_of_it() -> None:
    looked = RunRecord(file=FileFacts("./net.onnx", "ab12", 100), audits=(audit(),))
    assert merged(RECORD, looked).record.file == FILE


@pytest.mark.parametrize("made", [(), ("model", "file")])
def test_another_model_is_refused(made: Any) -> None:
    other = dataclasses.replace(MODEL, name="big", num_parameters=2_000, architecture="another")
    with pytest.raises(RecordError, match=r"r\.json is of another model \(net, a Net of 10 .* big, a Net of 2,000"):
        merged(RECORD, RunRecord(model=other, runs=(run(made=made),)), "r.json")


def test_other_numbers_are_refused_where_they_were_only_looked_at() -> None:
    new = RunRecord(model=OTHER_NUMBERS, errors=(profile(),), runs=(run("profile"),))
    with pytest.raises(RecordError, match="another quantized Net"):
        merged(RECORD, new)


def test_other_numbers_of_a_new_calibration_start_anew() -> None:
    new = RunRecord(model=OTHER_NUMBERS, runs=(run(made=("model",)),))
    assert merged(RECORD, new) == (new, RECORD.sections)


def test_a_new_file_of_the_same_model_drops_what_was_found_of_the_old_one() -> None:
    new = RunRecord(model=MODEL, file=OTHER_FILE, parity=(parity(),), runs=(run("export", made=("file",)),))
    record, dropped = merged(RECORD, new)
    assert record.file == OTHER_FILE and record.parity == new.parity and not record.audits and record.errors
    assert dropped == ("audits",)


def test_another_file_is_refused_where_it_was_only_looked_at() -> None:
    with pytest.raises(RecordError, match=r"another file \(net.onnx\), or new.onnx has changed"):
        merged(RECORD, RunRecord(file=OTHER_FILE, audits=(audit(),)))


def test_a_file_of_an_unknown_model() -> None:
    with pytest.raises(RecordError, match=r"nothing shows that net\.onnx is a file of it"):
        merged(RunRecord(model=MODEL), RunRecord(file=FILE, audits=(audit(),)))
    of_file = RunRecord(file=FILE, audits=(audit(),))
    for new in (RunRecord(model=MODEL), RunRecord(model=MODEL, file=OTHER_FILE, runs=(run(made=("file",)),))):
        with pytest.raises(RecordError, match="nothing shows that it is a file of net"):
            merged(of_file, new)
    assert merged(of_file, RunRecord(model=MODEL, file=FILE, parity=(parity(),))).record.model == MODEL


def test_a_file_that_was_compared_with_its_model_becomes_part_of_the_record() -> None:
    record, _ = merged(RunRecord(model=MODEL), RunRecord(model=MODEL, file=FILE, parity=(parity(),)))
    assert record.file == FILE and record.parity == (parity(),)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(record=RECORDS)
def test_merging_with_nothing_and_with_itself(record: RunRecord) -> None:
    assert merged(RunRecord(), record.replace(errors=(), parity=(), audits=())).record.file == record.file
    again, dropped = merged(merged(record, RunRecord()).record, RunRecord())
    assert again.sections == record.sections and not dropped


def test_an_audit_with_timings_is_kept() -> None:
    times = Latency(1.0, (1.0, 1.0), 1.0, (1.0, 1.0), 1.0, 1.0, 5, 1)
    timed = dataclasses.replace(audit(), latency={"float": times, "quantized": times})
    for old, new in ((timed, audit()), (audit(), timed)):
        record, _ = merged(RunRecord(file=FILE, audits=(old,)), RunRecord(file=FILE, audits=(new,)))
        assert record.audits == (timed,)
