"""Whole or not at all, and the old one until then."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from sparsebit.cli.outputs.output_files import checked_target, need_own_text, replace_text
from sparsebit.deploy.onnx_graph.model_file import staged
from sparsebit.errors import CheckpointError
from tests.cli.conftest import Sparsebit


def old_result(folder: Path) -> Path:
    folder.mkdir()
    for name in ("model.safetensors", "sparsebit.json"):
        (folder / name).write_text("old")
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_interrupt_does_not_stop_the_cleaning(tmp_path: Path, number: int) -> None:
    """The file that is on its way is cleared away although the user presses Ctrl-C again."""
    before, remove = signal.getsignal(number), shutil.rmtree

    def impatient(folder: Path, **options: bool) -> None:
        signal.raise_signal(number)
        remove(folder, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patch.setattr(shutil, "rmtree", impatient)
        with staged(tmp_path / "net.onnx") as path:
            path.write_text("half")
            raise KeyboardInterrupt
    assert os.listdir(tmp_path) == [] and signal.getsignal(number) == before


class TestCheckedTarget:
    def test_accepts_new_empty_and_own(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        old_result(tmp_path / "saved")
        for name in ("new", "deep/new", "empty", "saved"):
            assert checked_target(tmp_path / name) == tmp_path.resolve() / name

    def test_follows_links(self, tmp_path: Path) -> None:
        old_result(tmp_path / "saved")
        (tmp_path / "link").symlink_to(tmp_path / "saved")
        assert checked_target(tmp_path / "link") == (tmp_path / "saved").resolve()

    def test_refuses_what_is_not_ours(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(CheckpointError, match=r"notes\.txt"):
            checked_target(tmp_path)
        with pytest.raises(CheckpointError, match="is a file"):
            checked_target(tmp_path / "notes.txt")

    def test_refuses_a_place_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="cannot be written to"):
            checked_target(tmp_path / "file" / "saved")


class TestReplaceText:
    def test_a_pipe_is_written_to_and_stays(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        try:
            replace_text(pipe, "text")
            assert os.read(reader, 10) == b"text" and pipe.is_fifo()
        finally:
            os.close(reader)

    def test_a_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="is a folder; name a file in it"):
            replace_text(tmp_path, "text")

    def test_replaces(self, tmp_path: Path) -> None:
        file = tmp_path / "graph.mmd"
        for text in ("old", "new"):
            replace_text(file, text)
        assert file.read_text() == "new" and os.listdir(tmp_path) == ["graph.mmd"]

    def test_fault_leaves_the_old_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "graph.mmd"
        replace_text(file, "old")

        def full(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="disk full"):
            replace_text(file, "new")
        assert file.read_text() == "old" and os.listdir(tmp_path) == ["graph.mmd"]


class TestNeedOwnText:
    def test_results_of_ours_may_be_replaced(self, tmp_path: Path) -> None:
        file = tmp_path / "graph.md"
        need_own_text(file, "flowchart ")
        for text in ("", "flowchart TD"):
            file.write_text(text)
            need_own_text(file, "graph ", "flowchart ")

    @pytest.mark.parametrize("content", [b"# A page of mine", b"\xff\xfe", b"f"])
    def test_others_stay(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "README.md").write_bytes(content)
        with pytest.raises(CheckpointError, match="not an older result of this verb"):
            need_own_text(tmp_path / "README.md", "flowchart ")

    def test_verbs(self, sparsebit: Sparsebit, project: Path) -> None:
        Path("README.md").write_text("# Mine")
        Path("mixed.yaml").write_text("# Mine")
        net = ("-m", "own_project:Net")
        verbs: list[tuple[str, ...]] = [
            ("graph", *net, "-o", "README.md"),
            ("search", *net, "-d", "own_project:batches", "--budget", "weight_bits=6", "-o", "mixed.yaml"),
        ]
        for verb in verbs:
            assert "not an older result" in sparsebit(*verb).err
        assert Path("README.md").read_text() == Path("mixed.yaml").read_text() == "# Mine"
        for _ in range(2):
            assert sparsebit("graph", *net, "-o", "graph.md").code == 0
