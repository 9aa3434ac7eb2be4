from __future__ import annotations

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
