"""The name of an output says what is written; one that says something else is refused before the work."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from sparsebit.cli.outputs.output_names import check_folder_name, check_onnx_name
from tests.cli.conftest import Sparsebit

NET = ("-m", "own_project:Net")


@pytest.mark.parametrize("name", ["out", "out/", "resnet-v1.5", "a.b/c", "model.onnx.d", ".hidden"])
def test_folders(name: str) -> None:
    check_folder_name(Path(name))


@pytest.mark.parametrize("name", ["model.pt", "out/model.safetensors", "net.PTH", "model.xml", "model.gguf", "q.json"])
def test_files_where_a_folder_is_written(name: str) -> None:
    with pytest.raises(typer.BadParameter, match=rf"the result is a folder .*; write {Path(name).with_suffix('')}$"):
        check_folder_name(Path(name))


def test_a_folder_that_is_called_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.pt").mkdir()
    check_folder_name(tmp_path / "model.pt")


def test_onnx_files() -> None:
    check_onnx_name(Path("a/net.ONNX"))
    with pytest.raises(typer.BadParameter, match=r"write net\.onnx"):
        check_onnx_name(Path("net.pt"))


@pytest.mark.parametrize(
    "verb",
    [
        ("quantize", *NET, "-c", "weights-only", "-o", "model.pt"),
        ("quantize", *NET, "-d", "d.npz", "-o", "net.onnx", "-o", "model.safetensors"),
        ("prune", *NET, "--ratio", "0.5", "-o", "small.pt"),
        ("export", *NET, "--size", "8", "-o", "net.pt"),
        ("demo", "-o", "net.pt"),
        ("llm", "quantize", "model", "-o", "model.safetensors"),
        ("llm", "finetune", "model", "data.jsonl", "-o", "adapter.safetensors"),
        ("llm", "merge", "adapter", "-o", "merged.gguf"),
    ],
    ids=lambda verb: " ".join(verb[:2]),
)
def test_verbs(sparsebit: Sparsebit, project: Path, verb: tuple[str, ...]) -> None:
    answer = sparsebit(*verb)
    assert answer.code == 2 and "the result is a" in answer.err and "write " in answer.err
