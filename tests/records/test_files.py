from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sparsebit.errors import RecordError
from sparsebit.records import RunRecord, extend_record, read_record, write_record
from tests.records.examples import MODEL, RECORD, audit, profile, run


def test_written_and_read(tmp_path: Path) -> None:
    write_record(tmp_path / "r.json", RECORD)
    assert read_record(str(tmp_path / "r.json")) == RECORD
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_extended(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    extend_record(file, RunRecord(model=MODEL, runs=(run(),)))
    record, _ = extend_record(file, RunRecord(model=MODEL, errors=(profile(),), runs=(run("profile"),)))
    assert read_record(file) == record and record.sections == ("model", "errors") and len(record.runs) == 2


@pytest.mark.parametrize("content", [b"", b"notes of mine", b"\xff\xfe", b"{}"], ids=repr)
def test_other_files_stay_as_they_are(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "r.json"
    file.write_bytes(content)
    with pytest.raises(RecordError, match=r"r\.json is"):
        extend_record(file, RECORD)
    assert file.read_bytes() == content and len(list(tmp_path.iterdir())) == 1


def test_a_refused_record_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    write_record(file, RunRecord(model=MODEL))
    before = file.read_bytes()
    with pytest.raises(RecordError, match="nothing shows"):
        extend_record(file, RunRecord(file=RECORD.file, audits=(audit(),)))
    assert file.read_bytes() == before


def test_places_where_no_record_can_be(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is a folder; name a file in it"):
        write_record(tmp_path, RECORD)
    with pytest.raises(RecordError, match="does not exist; create it first"):
        write_record(tmp_path / "no" / "r.json", RECORD)
    with pytest.raises(RecordError, match="cannot be read: No such file"):
        read_record(tmp_path / "r.json")


def test_several_at_a_time_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    write_record(file, RunRecord(model=MODEL))
    threads = [
        threading.Thread(target=extend_record, args=(file, RunRecord(model=MODEL, runs=(run(f"verb {i}"),))))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.verb for one in read_record(file).runs} == {f"verb {i}" for i in range(8)}
