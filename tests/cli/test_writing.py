"""Whole or not at all, and the old one until then."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import sparsebit
from sparsebit.cli.writing import OWN_FILES, checked_target, replace_text, replacing_folder
from sparsebit.deploy.model_file import staged
from sparsebit.errors import CheckpointError


def old_result(folder: Path) -> Path:
    folder.mkdir()
    for name in OWN_FILES:
        (folder / name).write_text("old")
    return folder


def test_own_files_are_what_is_saved(tmp_path: Path) -> None:
    qmodel = sparsebit.quantize(nn.Linear(4, 4).eval(), torch.randn(4, 4), "virtual")
    assert set(os.listdir(qmodel.save(tmp_path / "saved"))) == OWN_FILES


class TestReplacingFolder:
    def test_makes_a_new_one_with_the_folders_above(self, tmp_path: Path) -> None:
        target = tmp_path / "a" / "b"
        with replacing_folder(target) as folder:
            (folder / "file").write_text("new")
            assert not target.exists()
        assert (target / "file").read_text() == "new" and os.listdir(target.parent) == ["b"]

    def test_replaces_an_old_one_whole(self, tmp_path: Path) -> None:
        target = old_result(tmp_path / "saved")
        with replacing_folder(target) as folder:
            (folder / "file").write_text("new")
        assert os.listdir(target) == ["file"] and os.listdir(tmp_path) == ["saved"]

    @pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError], ids=["Ctrl-C", "disk full"])
    def test_fault_leaves_the_old_one_and_nothing_else(self, tmp_path: Path, fault: type[BaseException]) -> None:
        target = old_result(tmp_path / "saved")
        with pytest.raises(fault), replacing_folder(target) as folder:  # noqa: PT012
            (folder / "model.safetensors").write_text("half")
            raise fault
        assert set(os.listdir(target)) == OWN_FILES and os.listdir(tmp_path) == ["saved"]
        assert (target / "model.safetensors").read_text() == "old"

    def test_fault_of_the_swap_puts_the_old_one_back(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        target = old_result(tmp_path / "saved")
        rename, calls = os.rename, []

        def second_fails(source: Path, place: Path) -> None:
            calls.append(place)
            if len(calls) == 2:
                raise OSError
            rename(source, place)

        monkeypatch.setattr(os, "rename", second_fails)
        with pytest.raises(OSError), replacing_folder(target):  # noqa: PT011
            pass
        assert set(os.listdir(target)) == OWN_FILES and os.listdir(tmp_path) == ["saved"]


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
