"""Folders in which results are made: gone afterwards, and those of killed runs at the next run."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsebit import folders
from sparsebit.errors import ConfigError
from sparsebit.folders import (
    alone_in,
    exchange,
    is_staging_folder,
    locked,
    need_new,
    put_in_place,
    replace_file,
    staging_folder,
    write_text,
)


class TestStagingFolder:
    def test_is_made_beside_with_the_folders_above_and_goes(self, tmp_path: Path) -> None:
        with staging_folder(tmp_path / "a" / "b") as folder:
            assert os.listdir(tmp_path / "a") == [folder.name] and is_staging_folder(folder.name)
            (folder / "file").write_text("")
        assert os.listdir(tmp_path) == []

    def test_what_was_moved_out_of_it_stays(self, tmp_path: Path) -> None:
        with staging_folder(tmp_path / "a" / "b") as folder:
            os.rename(folder, tmp_path / "a" / "b")
        assert os.listdir(tmp_path / "a") == ["b"]

    def test_inside(self, tmp_path: Path) -> None:
        with staging_folder(tmp_path, inside=True) as folder:
            assert folder.parent == tmp_path

    @pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError], ids=["Ctrl-C", "disk full"])
    def test_goes_after_a_fault(self, tmp_path: Path, fault: type[BaseException]) -> None:
        with pytest.raises(fault), staging_folder(tmp_path / "saved"):
            raise fault
        assert os.listdir(tmp_path) == []

    def test_those_in_use_stay(self, tmp_path: Path) -> None:
        with staging_folder(tmp_path / "saved") as first, staging_folder(tmp_path / "saved"):
            assert first.is_dir()

    def test_those_of_killed_runs_go(self, tmp_path: Path) -> None:
        code = "import os; from pathlib import Path; from sparsebit.folders import staging_folder; "
        code += f"kept = staging_folder(Path({str(tmp_path / 'saved')!r})); kept.__enter__(); os.kill(os.getpid(), 9)"
        subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[1])
        (left,) = os.listdir(tmp_path)
        with staging_folder(tmp_path / "other"):
            assert left in os.listdir(tmp_path)  # of another target
        with staging_folder(tmp_path / "saved"):
            assert left not in os.listdir(tmp_path)

    def test_what_only_looks_alike_stays(self, tmp_path: Path) -> None:
        names = [".saved.sparsebit-mine", ".saved.backup", "saved.sparsebit-0123456789abcdef"]
        for name in names:
            (tmp_path / name).mkdir()
        with staging_folder(tmp_path / "saved"):
            pass
        assert sorted(os.listdir(tmp_path)) == sorted(names)

    def test_where_there_are_no_locks_nothing_is_taken_for_abandoned(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(folders, "_lock", lambda *_, **__: None)
        with staging_folder(tmp_path / "saved") as first, staging_folder(tmp_path / "saved"):
            assert first.is_dir()

    def test_alone_refuses_a_target_that_is_being_made(self, tmp_path: Path) -> None:
        with (
            staging_folder(tmp_path / "saved"),
            staging_folder(tmp_path / "other", alone=True),
            pytest.raises(ConfigError, match="saved now"),
            staging_folder(tmp_path / "saved", alone=True),
        ):
            pass
        with staging_folder(tmp_path / "saved", alone=True):
            pass
        assert os.listdir(tmp_path) == []


class TestReplaceFile:
    def test_the_target_of_a_link_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("old")
        (tmp_path / "link").symlink_to("file")
        replace_file(tmp_path / "link", lambda made: made.write_text("new"))
        assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"

    def test_a_file_system_that_cannot_flush_folders(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fsync(number: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{number}"):
                raise OSError(errno.EINVAL, "not for folders")

        monkeypatch.setattr(os, "fsync", fsync)
        replace_file(tmp_path / "file", lambda made: made.write_text("new"))
        assert (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize("in_one_step", [True, False])
class TestPutInPlace:
    @pytest.fixture(autouse=True)
    def _system(self, monkeypatch: pytest.MonkeyPatch, in_one_step: bool) -> None:
        if not in_one_step:
            monkeypatch.setattr(folders, "_renameat2", lambda: None)

    @pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
    def test_keeps_what_is_there(self, tmp_path: Path, kind: str) -> None:
        made, target = tmp_path / "made", tmp_path / "target"
        if kind == "folder":
            made.mkdir()
            target.mkdir()  # empty: a plain rename replaces it
        else:
            made.write_text("new")
            target.write_text("old") if kind == "file" else target.symlink_to("nowhere")
        with pytest.raises(ConfigError, match="target was created by something else during this run; that is kept"):
            put_in_place(made, target)
        assert made.exists() and (kind != "file" or target.read_text() == "old")

    def test_moves(self, tmp_path: Path) -> None:
        (tmp_path / "made").write_text("new")
        put_in_place(tmp_path / "made", tmp_path / "target")
        assert os.listdir(tmp_path) == ["target"]

    def test_a_folder_that_is_missing(self, tmp_path: Path) -> None:
        (tmp_path / "made").write_text("new")
        with pytest.raises(FileNotFoundError):
            put_in_place(tmp_path / "made", tmp_path / "missing" / "target")


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_an_output_that_exists_is_refused(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    need_new(target)
    target.touch() if kind == "file" else target.symlink_to("nowhere")
    with pytest.raises(ConfigError, match="target exists"):
        need_new(target)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full")
def test_an_error_of_the_disk_names_the_file() -> None:
    with pytest.raises(OSError, match="/dev/full"):
        write_text(Path("/dev/full"), "text")


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2")
class TestExchange:
    def test_two_folders(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            (tmp_path / name / name).touch()
        assert exchange(tmp_path / "a", tmp_path / "b")
        assert os.listdir(tmp_path / "a") == ["b"] and os.listdir(tmp_path / "b") == ["a"]

    def test_one_that_is_missing(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        assert not exchange(tmp_path / "a", tmp_path / "b")
        assert os.listdir(tmp_path) == ["a"]

    def test_a_system_without_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(folders, "_renameat2", lambda: None)
        assert not exchange(tmp_path, tmp_path)


def test_a_lock_is_free_again_afterwards(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path), pytest.raises(BlockingIOError), alone_in(tmp_path):
            pass
