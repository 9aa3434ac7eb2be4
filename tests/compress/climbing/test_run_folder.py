"""The folder of a search: whose it is, what an interrupted call leaves, and copies that use no space."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparsebit.compress.climbing import run_folder
from sparsebit.compress.climbing.run_folder import CANDIDATES, LADDER, RunFolder
from sparsebit.errors import ConfigError, RecordError
from sparsebit.records.ladder import Ladder
from tests.compress.made import goal, ladder, step


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run whose ladder has one step; the folder of a second one was begun."""
    made = RunFolder(tmp_path / "run")
    with made.alone():
        for name in ("01-w8", "02-w4"):
            (made.step_folder(name) / "model.onnx").write_text(name)
        made.write(ladder(goal(), step("01-w8")))
    return made


def read(run: RunFolder, identity: str = "id", minutes: float = 20.0) -> Ladder | None:
    return run.read(identity, minutes, "best.onnx")


class TestWhoseItIs:
    def test_a_new_or_empty_folder_becomes_a_run(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        for place in (tmp_path / "empty", tmp_path / "new" / "inside"):
            made = RunFolder(place)
            with made.alone():
                assert read(made, "id") is None
            assert (place / CANDIDATES).is_dir()

    def test_other_files_and_folders_are_refused_and_kept(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / LADDER).write_text("mine")
        for name in ("file", "folder"):
            with pytest.raises(ConfigError, match="is not a run of compress"), RunFolder(tmp_path / name).alone():
                pass
        assert (tmp_path / "file").read_text() == (tmp_path / "folder" / LADDER).read_text() == "mine"

    def test_a_home_folder_and_links_are_resolved(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "link").symlink_to(tmp_path / "real")
        assert RunFolder("~/run").path == tmp_path / "run"
        assert RunFolder(tmp_path / "link").path == tmp_path / "real"

    def test_only_one_call_at_a_time(self, run: RunFolder) -> None:
        refused = pytest.raises(ConfigError, match="another process works in")
        with run.alone(), refused, RunFolder(run.path).alone():
            pass
        with RunFolder(run.path).alone():
            pass

    def test_a_killed_process_leaves_no_lock(self, run: RunFolder) -> None:
        holding = (
            "import os, signal, sys\n"
            "from sparsebit.folders import alone_in\n"
            "with alone_in(sys.argv[1]):\n"
            "    print('held', flush=True)\n"
            "    sys.stdin.read()\n"
        )
        command = [sys.executable, "-c", holding, str(run.path)]
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        ) as other:
            assert other.stdout is not None and other.stdout.readline() == "held\n"
            with pytest.raises(ConfigError, match="another process works in"), run.alone():
                pass
            other.kill()
        with run.alone():
            pass


class TestWhatIsRead:
    def test_finished_steps_are_kept_and_unfinished_ones_removed(self, run: RunFolder) -> None:
        found = read(run, "id")
        assert found is not None and found.steps == (step("01-w8"),)
        assert [folder.name for folder in (run.path / CANDIDATES).iterdir()] == ["01-w8"]
        assert (run.path / found.steps[0].folder / "model.onnx").read_text() == "01-w8"
        run.step_folder("02-w4")  # the name is free again

    def test_the_steps_of_a_call_that_was_killed_before_its_first_ladder(self, run: RunFolder) -> None:
        (run.path / LADDER).unlink()
        assert read(run, "id") is None and not any((run.path / CANDIDATES).iterdir())

    def test_another_run_is_refused_and_nothing_removed(self, run: RunFolder) -> None:
        with pytest.raises(ConfigError, match="another model, other data or another goal"):
            read(run, "other")
        assert len(list((run.path / CANDIDATES).iterdir())) == 2

    def test_a_file_among_the_candidates_is_kept(self, run: RunFolder) -> None:
        (run.path / CANDIDATES / "notes.txt").write_text("mine")
        read(run)
        assert (run.path / CANDIDATES / "notes.txt").read_text() == "mine"

    @pytest.mark.parametrize("text", ["", "{}", "\udcff", '{"format": "sparsebit-ladder", "version": 1}'], ids=len)
    def test_a_damaged_ladder_is_an_error_and_nothing_is_removed(self, run: RunFolder, text: str) -> None:
        (run.path / LADDER).write_text(text, errors="surrogateescape")
        with pytest.raises(RecordError, match=r"ladder\.json"):
            read(run, "id")
        assert len(list((run.path / CANDIDATES).iterdir())) == 2

    def test_a_ladder_is_replaced_as_a_whole(self, run: RunFolder) -> None:
        before = (run.path / LADDER).stat().st_ino
        run.write(ladder(goal(), step("01-w8"), step("02-w4")))
        assert (run.path / LADDER).stat().st_ino != before
        assert sorted(path.name for path in run.path.iterdir()) == [CANDIDATES, LADDER]


class TestWhatGoesOn:
    @pytest.fixture
    def finished(self, run: RunFolder) -> Ladder:
        (run.path / "best.onnx").write_text("01-w8")
        late = step("02-w4", verdict="out of time", seconds=5.0, cost=None, loss=None)
        made = ladder(goal(), step("01-w8", seconds=3.0), late, seconds=10.0)
        run.write(made)
        return made

    def test_a_finished_search_is_read(self, run: RunFolder, finished: Ladder) -> None:
        assert read(run) == read(run, minutes=1.0) == finished

    def test_more_minutes_continue_it(self, run: RunFolder, finished: Ladder) -> None:
        found = read(run, minutes=40.0)
        assert found is not None and not found.finished and found.goal.minutes == 40.0
        assert found.steps == finished.steps[:1] and found.seconds == 5.0 and found.best == "01-w8"
        run.step_folder("02-w4")  # the name is free again

    def test_other_minutes_of_a_stopped_one_count(self, run: RunFolder, finished: Ladder) -> None:
        run.write(finished.replace(finished=False))
        found = read(run, minutes=1.0)
        assert found is not None and found.goal.minutes == 1.0 and found.steps == finished.steps

    def test_without_the_result_it_goes_on(self, run: RunFolder, finished: Ladder) -> None:
        (run.path / "best.onnx").unlink()
        found = read(run)
        assert found is not None and not found.finished and found.steps == finished.steps

    def test_without_its_candidates_a_finished_one_is_read_and_a_stopped_one_begins_again(
        self, run: RunFolder, finished: Ladder
    ) -> None:
        shutil.rmtree(run.path / CANDIDATES)
        with run.alone():
            assert read(run) == finished
            found = read(run, minutes=40.0)
        assert found is not None and (found.steps, found.best, found.pareto) == ((), "", ())
        assert found.seconds == 2.0


def no_links(self: Path, target: Any) -> None:
    raise OSError("the file system has no hard links")


@pytest.mark.parametrize("has_links", [True, False])
class TestCopies:
    @pytest.fixture(autouse=True)
    def _links(self, has_links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        if not has_links:
            monkeypatch.setattr(run_folder.Path, "hardlink_to", no_links)

    def test_a_file_replaces_the_older_one(self, run: RunFolder, has_links: bool) -> None:
        for name in ("01-w8", "02-w4"):
            source = run.path / CANDIDATES / name / "model.onnx"
            target = run.copy_in(source, "best.onnx")
            assert target == run.path / "best.onnx" and target.read_text() == name
            assert target.samefile(source) is has_links
        assert (run.path / CANDIDATES / "01-w8" / "model.onnx").read_text() == "01-w8"

    def test_a_folder_replaces_the_older_one_with_all_its_files(self, run: RunFolder, has_links: bool) -> None:
        first, second = run.path / CANDIDATES / "01-w8", run.path / CANDIDATES / "02-w4"
        (first / "more").mkdir()
        (first / "more" / "tokens.json").write_text("[]")
        for source in (first, second):
            target = run.copy_in(source, "best")
            found = {path.relative_to(target): path.read_bytes() for path in target.rglob("*") if path.is_file()}
            wanted = {path.relative_to(source): path.read_bytes() for path in source.rglob("*") if path.is_file()}
            assert found == wanted
            assert (target / "model.onnx").samefile(source / "model.onnx") is has_links
        assert sorted(path.name for path in run.path.iterdir()) == ["best", CANDIDATES, LADDER]

    def test_a_folder_that_cannot_be_swapped_is_replaced(
        self, run: RunFolder, has_links: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(run_folder, "exchange", lambda first, second: False)
        for name in ("01-w8", "02-w4"):
            target = run.copy_in(run.path / CANDIDATES / name, "best")
            assert (target / "model.onnx").read_text() == name
