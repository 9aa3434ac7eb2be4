"""Finished parts of a run: read by the same run alone, whole or not at all, and not by another process."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from sparsebit.errors import CheckpointError
from sparsebit.execution.run_folder import RunFolder, has_begun, hold_run, read_part, write_part
from sparsebit.folders import alone_in

TENSORS = {"weight": torch.arange(6.0).view(2, 3)}
SETTINGS = {"recipe": {"bits": 4}, "data": "abc"}


def test_parts_are_read_by_the_same_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "kept", SETTINGS).open()
    assert has_begun(folder.path) and folder.read(3, {}) is None
    folder.write(3, TENSORS, {"block": "a"})
    folder.keep_note("note.json", "{}")
    found = RunFolder(tmp_path / "kept", SETTINGS).open().read(3, {"block": "a"})
    assert found is not None and torch.equal(found[0]["weight"], TENSORS["weight"]) and found[1]["block"] == "a"
    assert (folder.note("note.json"), folder.note("other.json")) == ("{}", None)
    with pytest.raises(CheckpointError, match="its block differ"):
        folder.read(3, {"block": "b"})
    folder.remove()
    assert not folder.path.exists()


def test_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, SETTINGS).open()
    folder.write(0, TENSORS, {})
    with pytest.raises(CheckpointError, match="its data, more differ"):
        RunFolder(tmp_path, {**SETTINGS, "data": "abd", "more": 1}).open()
    part = folder.file(0).read_bytes()
    other = RunFolder(tmp_path / "other", {**SETTINGS, "data": "abd"}).open()
    other.file(0).write_bytes(part)
    with pytest.raises(CheckpointError, match="its run differ"):
        other.read(0, {})


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 4}'])
def test_a_damaged_description_is_an_error(tmp_path: Path, content: str) -> None:
    RunFolder(tmp_path, SETTINGS).open()
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        RunFolder(tmp_path, SETTINGS).open()


def test_an_older_format_is_an_error(tmp_path: Path) -> None:
    RunFolder(tmp_path, SETTINGS).open()
    file = tmp_path / "run.json"
    file.write_text(file.read_text().replace('"format": 4', '"format": 3'))
    with pytest.raises(CheckpointError, match="its format is 3"):
        RunFolder(tmp_path, SETTINGS).open()


def test_a_damaged_part_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "part.safetensors"
    write_part(path, TENSORS, {"step": "1"})
    assert read_part(path)[1]["step"] == "1"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum differs"):
        read_part(path)


def test_tensors_of_something_else_are_not_taken_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="not the folder of an interrupted run"):
        RunFolder(tmp_path, SETTINGS).open()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="not the folder of an interrupted run"):
        RunFolder(tmp_path / "file", SETTINGS).open()


def test_a_held_folder_is_for_one_process(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with ExitStack() as held:
        partial = hold_run(target, held)
        assert partial == tmp_path / "deep" / "out.partial"
        with pytest.raises(CheckpointError, match="another process works in"), ExitStack() as other:
            hold_run(target, other)
    assert not (tmp_path / "deep").exists()  # it was empty
    with ExitStack() as held:
        RunFolder(hold_run(target, held), SETTINGS).open()
    assert has_begun(partial)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_held_folder_of_something_else_is_refused(tmp_path: Path, kind: str) -> None:
    partial = tmp_path / "out.partial"
    if kind == "file":
        partial.write_text("notes")
    else:
        partial.mkdir()
        (partial / "notes.txt").write_text("notes")
    with pytest.raises(CheckpointError, match="not the folder of an interrupted run"), ExitStack() as held:
        hold_run(tmp_path / "out", held)
    assert partial.exists()
    with ExitStack() as held:
        (tmp_path / "other.partial").mkdir()
        (tmp_path / "other.partial" / ".run.json.sparsebit-0123456789abcdef").mkdir()  # of a run that was killed
        with alone_in(hold_run(tmp_path / "other", held).parent):
            pass
