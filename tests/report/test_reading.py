from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsebit.errors import RecordError
from sparsebit.records import write_record
from sparsebit.report import read_run
from tests.report.made_runs import LADDER, RECORD


def test_a_record_a_ladder_and_their_folders(tmp_path: Path) -> None:
    write_record(tmp_path / "net.json", RECORD)
    assert read_run(tmp_path / "net.json").name == "net"
    run = tmp_path / "run"
    run.mkdir()
    write_record(run / "record.json", RECORD)
    assert read_run(run).name == "run" and not read_run(run).steps
    (run / "ladder.json").write_text(LADDER.to_json())
    assert read_run(run).steps and read_run(run).layers
    assert read_run(run / "ladder.json").name == "run"


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("missing", None, "does not exist; give the folder of `sparsebit compress`"),
        ("cut.json", '{"format": "sparsebit-record", ', "cut.json is damaged: Expecting property name"),
        ("deep.json", "[" * 100_000, "deep.json is damaged"),
        ("other.json", "[1, 2]", "other.json is not a record of Sparsebit; give"),
        ("binary.json", "\udcff\udcfe", "binary.json is damaged, or not a text file"),
        ("run/ladder.json", "{}", "ladder.json is not a ladder"),
        ("run/ladder.json", '{"format": "sparsebit-ladder", "version": 1}', "ladder.identity is missing"),
        ("run/record.json", '{"format": "sparsebit-record", "version": 99}', "of a newer Sparsebit"),
        ("run/channels.json", "[]", "holds a list, not an object"),
        ("run/config.json", '{"model_type": "llama"}', "has no quantization_config"),
        ("run/notes.txt", "", "run holds notes.txt, and no record"),
    ],
)
def test_damage_and_other_files_are_errors(tmp_path: Path, name: str, text: str | None, fault: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(RecordError) as caught:
        read_run(path.parent if path.parent.name == "run" else path)
    assert fault in str(caught.value)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds nothing, and no record"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("kind", "place", "value"),
    [
        ("ladder", ("best",), "99-none"),
        ("ladder", ("float_cost", "num_bytes"), 10**400),
        ("ladder", ("goal", "budget"), {"height": 5.0}),
        ("record", ("errors", 0, "sites", 0, "histogram", "counts", 0), -1),
    ],
    ids=["no such step", "a huge number", "no such budget", "a negative count"],
)
def test_values_that_no_run_writes_are_errors(
    kind: str, place: tuple[str | int, ...], value: object, tmp_path: Path
) -> None:
    values = json.loads(LADDER.to_json() if kind == "ladder" else RECORD.to_json())
    inner = values
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (tmp_path / "made.json").write_text(json.dumps(values))
    with pytest.raises(RecordError, match=r"made\.json is damaged: its values do not fit together \("):
        read_run(tmp_path / "made.json")
