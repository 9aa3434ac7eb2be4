"""`--record FILE`: verbs fill one record, extend it, and refuse that of another model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from sparsebit.records import RunRecord, read_record, write_record
from sparsebit.records.run_record import VERSION
from tests.cli.conftest import Sparsebit

NET = ("-m", "own_project:Net", "-d", "own_project:batches")
QUANTIZE = ("quantize", *NET, "--device", "cpu", "-q", "--record", "r.json")
PROFILE = ("profile", *NET, "-q", "--record", "r.json")


def test_quantize_then_profile(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*QUANTIZE, "-o", "saved", "--json")
    assert answer.code == 0, answer.err
    record = read_record("r.json")
    assert record.sections == ("model", "config", "plan", "graph", "coverage", "calibration", "output")
    assert answer.json["record"] == "r.json" and answer.json["coverage"]["num_weighted"] == 3
    assert record.model is not None and (record.model.name, record.model.module_type) == ("own_project:Net", "Net")
    assert record.calibration is not None and record.calibration.num_samples == 24
    assert record.calibration.data and "own_project:batches" in record.calibration.data
    assert record.output is not None and record.output.sqnr_db == answer.json["output_sqnr_db"]
    (run,) = record.runs
    assert run.verb == "quantize" and set(run.phases) == {"capture", "calibration"} and run.made == ("model",)

    answer = sparsebit(*PROFILE, "--quantized", "saved", "--json")
    assert answer.code == 0, answer.err
    extended = read_record("r.json")
    assert extended.sections == (*record.sections, "errors") and extended.calibration == record.calibration
    assert extended.runs[0] == run and extended.runs[1].verb == "profile" and "profile" in extended.runs[1].phases
    (profile,) = extended.errors
    assert [layer.layer for layer in profile.layers] == [layer["layer"] for layer in answer.json["layers"]]
    assert {"stem.0.weight", "head.input"} <= {site.site for site in profile.sites}
    assert all(site.histogram is not None and len(site.histogram.counts) <= 64 for site in profile.sites)

    assert sparsebit(*PROFILE, "--quantized", "saved", "--sync").code == 0
    assert [one.sync for one in read_record("r.json").errors] == [False, True]


def test_profile_that_calibrates_the_same_way_extends(sparsebit: Sparsebit, project: Path) -> None:
    assert sparsebit(*QUANTIZE, "-o", "saved").code == 0
    answer = sparsebit(*PROFILE, "--device", "cpu")
    assert answer.code == 0 and "removed" not in answer.err
    assert [run.verb for run in read_record("r.json").runs] == ["quantize", "profile"]


def test_another_calibration_starts_anew_and_says_so(sparsebit: Sparsebit, project: Path) -> None:
    assert sparsebit(*PROFILE, "--device", "cpu").code == 0
    answer = sparsebit(*QUANTIZE, "-n", "4", "-o", "saved")
    assert (
        answer.code == 0
        and "r.json: model, config, plan, graph, coverage, calibration, output, errors described" in answer.err
    )
    record = read_record("r.json")
    assert not record.errors and record.calibration is not None and record.calibration.num_samples == 4


def test_another_model_is_refused_before_the_work(sparsebit: Sparsebit, project: Path) -> None:
    assert sparsebit(*QUANTIZE, "-o", "saved").code == 0
    before = Path("r.json").read_bytes()
    answer = sparsebit(*QUANTIZE, "--model-args", '{"classes": 7}', "-o", "other")
    assert answer.code == 1 and "r.json is of another model (own_project:Net, a Net of " in answer.err
    assert Path("r.json").read_bytes() == before and not Path("other").exists()
    answer = sparsebit("quantize", "-m", "own_project:Pair", "-c", "weights-only", "-o", "o", "--record", "r.json")
    assert answer.code == 1 and "this one is own_project:Pair, a Pair" in answer.err


def test_a_saved_model_of_other_numbers_is_refused(sparsebit: Sparsebit, project: Path) -> None:
    assert sparsebit("quantize", *NET, "-c", "virtual", "--device", "cpu", "-q", "-o", "virtual").code == 0
    assert sparsebit(*QUANTIZE, "-o", "saved").code == 0
    answer = sparsebit("export", "virtual", *NET, "-o", "net.onnx", "--record", "r.json")
    assert answer.code == 1 and "another quantized Net" in answer.err and not Path("net.onnx").exists()
    answer = sparsebit(*PROFILE, "--quantized", "virtual")
    assert answer.code == 1 and "another quantized Net" in answer.err and "errors" not in read_record("r.json").sections


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.json is damaged"),
        ("[]", "r.json is not a Sparsebit record"),
        (json.dumps({"format": "sparsebit-record", "version": VERSION + 1}), "of a newer Sparsebit"),
        (json.dumps({"format": "sparsebit-record", "version": 1, "modell": {}}), "did you mean model?"),
    ],
    ids=["empty", "other", "future", "unknown"],
)
def test_files_that_cannot_be_extended(sparsebit: Sparsebit, project: Path, text: str, message: str) -> None:
    Path("r.json").write_text(text)
    answer = sparsebit(*QUANTIZE, "-o", "saved")
    assert answer.code == 1 and message in answer.err and "Traceback" not in answer.err
    assert Path("r.json").read_text() == text and not Path("saved").exists()


@pytest.mark.parametrize("place", ["no/such/r.json", "."])
def test_places_where_no_record_can_be(sparsebit: Sparsebit, project: Path, place: str) -> None:
    answer = sparsebit("quantize", *NET, "-o", "saved", "--record", place)
    assert answer.code == 1 and not Path("saved").exists()


def test_weights_alone(sparsebit: Sparsebit, project: Path) -> None:
    command = ("quantize", "-m", "own_project:Pair", "-c", "weights-only", "--device", "cpu", "-q")
    assert sparsebit(*command, "-o", "saved", "--record", "r.json").code == 0
    record = read_record("r.json")
    assert record.calibration is not None and record.calibration.num_samples == 0 and record.output is None


@pytest.mark.slow
def test_every_verb_fills_one_record(sparsebit: Sparsebit, project: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    to = ("-q", "--record", "r.json")
    source = ("-m", "own_project:Net", "--against", "saved")
    commands = [
        (*QUANTIZE, "-o", "saved", "-o", "net.onnx"),
        (*PROFILE, "--quantized", "saved"),
        ("audit", "net.onnx", "--repeats", 1, *to),
        ("check", "net.onnx", "-d", "own_project:batches", *to),
        ("check", "net.onnx", "-d", "own_project:batches", *source, *to),
    ]
    for command in commands:
        answer = sparsebit(*command)
        assert answer.code == 0, (command, answer.err)
    record = read_record("r.json")
    assert record.sections == (
        *("model", "config", "plan", "graph", "coverage", "calibration", "output"),
        *("errors", "file", "parity", "audits"),
    )
    assert [run.verb for run in record.runs] == ["quantize", "profile", "audit", "check", "check"]
    assert set(record.runs[0].phases) == {"capture", "calibration", "export", "check", "audit"}
    assert {one.parity.against for one in record.parity} == {"the simulation", "the file as it is written"}
    assert all(one.fault is None and one.data for one in record.parity)
    (audit,) = record.audits
    assert audit.latency and record.file is not None and record.file.float_bytes
    assert RunRecord.from_json(record.to_json()) == record

    answer = sparsebit("export", "saved", *NET, "--dynamic-batch", "-o", "open.onnx", *to)
    assert answer.code == 0 and "r.json: audits described an earlier model or file" not in answer.err, answer.err
    again = read_record("r.json")
    assert again.file is not None and again.file.path == "open.onnx" and len(again.parity) == 1
    assert again.errors == record.errors
    assert again.audits[0].latency not in ({}, audit.latency)  # of the new file

    answer = sparsebit("audit", "net.onnx", "--repeats", 0, *to)
    assert answer.code == 1 and "r.json is of another file (open.onnx)" in answer.err


@pytest.mark.slow
def test_a_file_alone(sparsebit: Sparsebit, project: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    to = ("-q", "--record", "f.json")
    answer = sparsebit("export", "-m", "own_project:Net", "--size", 8, "-o", "float.onnx", *to)
    assert answer.code == 0, answer.err
    record = read_record("f.json")
    assert record.sections == ("model", "file") and record.runs[0].made == ("file",)
    assert sparsebit("audit", "float.onnx", "--repeats", 0, *to).code == 0
    answer = sparsebit("check", "float.onnx", "-d", "own_project:batches", "-m", "own_project:Net", *to)
    assert answer.code == 0, answer.err
    record = read_record("f.json")
    assert record.sections == ("model", "file", "parity", "audits")
    assert record.parity[0].fault is None and record.parity[0].data
    other = dataclasses.replace(record.file, sha256="another") if record.file else None
    write_record("f.json", record.replace(file=other))
    answer = sparsebit("audit", "float.onnx", "--repeats", 0, *to)
    assert answer.code == 1 and "float.onnx has changed since" in answer.err


@pytest.mark.slow
def test_a_failed_check_is_recorded(sparsebit: Sparsebit, project: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert sparsebit("quantize", *NET, "-q", "--device", "cpu", "-o", "net.onnx").code == 0
    assert sparsebit("export", "-m", "own_project:Net", "--size", 8, "-q", "-o", "float.onnx").code == 0
    limits = ("--against", "float.onnx", "--min-sqnr", 200, "-q", "--record", "c.json")
    answer = sparsebit("check", "net.onnx", "-d", "own_project:batches", *limits)
    assert answer.code == 1
    (check,) = read_record("c.json").parity
    assert check.fault is not None and "200.0 dB is required" in check.fault
