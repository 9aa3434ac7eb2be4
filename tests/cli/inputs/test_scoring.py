"""Verbs say what accuracy is left, wherever labels are given."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from sparsebit.cli.inputs.scoring import CALIBRATION
from sparsebit.records import read_record
from tests.cli.conftest import Sparsebit

NET = ("-m", "own_project:Net")
pytestmark = pytest.mark.usefixtures("untimed")
PRUNE = ("prune", *NET, "--ratio", "0.5", "-o", "small", "--json")
BYTES = ("quantize", *NET, "-c", "weights-only", "-o", "int8", "--json")
MORE = """
    def labelled(seed=0):
        torch.manual_seed(seed)
        for _ in range(2):
            x = torch.randn(16, 3, 8, 8)
            yield x, net.eval()(x).argmax(1)


    def mean(model):
        return model(torch.ones(1, 3, 8, 8)).mean().item()
"""


@pytest.fixture
def labelled(project: Path) -> Path:
    """The project with labels that the float model gives."""
    source = project / "own_project.py"
    source.write_text(source.read_text() + textwrap.dedent(MORE))
    return project


def npz(name: str, **arrays: Any) -> None:
    import own_project  # type: ignore[import-not-found]

    x = torch.randn(16, 3, 8, 8)
    labels = own_project.Net().eval()(x).argmax(1)
    numpy.savez(name, **{"x": x.numpy(), "labels": labels.numpy(), **arrays})


@pytest.mark.slow
def test_quantize_export_and_check(sparsebit: Sparsebit, labelled: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    data = ("-d", "own_project:labelled")
    answer = sparsebit(
        "quantize", *NET, *data, "-c", "virtual", "-o", "int8", "-o", "int8.onnx", "--json", "--record", "net.json"
    )
    assert answer.code == 0, answer.err
    told = answer.json["accuracy"]
    kept = read_record("net.json").accuracy
    assert (
        kept is not None and kept.unit == "%" and [one.name for one in kept.models] == ["float", "simulation", "file"]
    )
    assert kept.models[2].score == 100 * told["file"]["score"] and kept.models[2].margin == 100 * told["file"]["margin"]
    assert told["num_samples"] == 32 and told["float"]["score"] == 1.0 and told["note"] == CALIBRATION
    assert told["file"]["score"] >= 0.9 <= told["simulation"]["score"] and "margin" in told["file"]
    runs: list[tuple[tuple[str, ...], Sequence[str]]] = [
        (("check", "int8.onnx", *data), ["file"]),
        (("check", "int8.onnx", *data, *NET), ["float", "file"]),
        (("check", "int8.onnx", *data, *NET, "--against", "int8"), ["float", "simulation", "file"]),
        (("check", "int8.onnx", *data, "--against", "int8.onnx", "--runtime", "onnxruntime"), ["float", "file"]),
        (("export", "int8", *data, *NET, "-o", "again.onnx"), ["float", "simulation", "file"]),
        (("export", *NET, "--size", "8", "--test-data", data[1], "-o", "float.onnx"), ["float", "file"]),
    ]
    for run, names in runs:
        answer = sparsebit(*run, "--json")
        assert answer.code == 0, (run, answer.err)
        told = answer.json["accuracy"]
        assert [name for name, value in told.items() if isinstance(value, dict)] == names and told["note"] is None


def test_prune(sparsebit: Sparsebit, labelled: Path) -> None:
    answer = sparsebit(*PRUNE, "-d", "own_project:labelled", "--no-reconstruct")
    assert answer.code == 0, answer.err
    told = answer.json["accuracy"]
    assert told["dense"]["score"] == 1.0 and told["pruned"]["score"] < 1 and told["note"] == CALIBRATION
    answer = sparsebit(*PRUNE, "--test-data", "own_project:labelled")
    assert answer.json["accuracy"]["note"] is None and answer.json["accuracy"]["pruned"]["changed"] > 0


def test_arrays_and_folders_of_classes(sparsebit: Sparsebit, labelled: Path) -> None:
    npz("test.npz")
    answer = sparsebit(*BYTES, "--test-data", "test.npz", "--test-samples", "8")
    assert answer.json["accuracy"]["data"] == "8 of 16 samples in test.npz"
    assert answer.json["accuracy"]["num_samples"] == 8 and answer.json["accuracy"]["float"]["score"] == 1.0
    image = pytest.importorskip("PIL.Image")
    for place in range(10):
        folder = Path("images") / f"class {place}"
        folder.mkdir(parents=True)
        image.new("RGB", (8, 8), (place, 99, 7)).save(folder / "one.png")
    for data in (
        ("--test-data", "images"),
        ("-d", "images"),
        ("-d", "own_project:batches", "--test-data", "images"),
        ("-d", "images", "--test-data", "test.npz"),
    ):
        answer = sparsebit(*BYTES, "--size", "8", *data)
        assert answer.code == 0, (data, answer.err)
        assert answer.json["accuracy"]["num_samples"] == 16 if "test.npz" in data else 10
    answer = sparsebit(*BYTES, "--size", "8", "-d", "test.npz", "--test-data", "test.npz")
    assert answer.code == 2 and "--size cannot be used with test.npz" in answer.err


def test_without_labels_nothing_is_said(sparsebit: Sparsebit, labelled: Path) -> None:
    answer = sparsebit(*PRUNE, "-d", "own_project:batches")
    assert answer.json["accuracy"] is None and "accuracy" not in answer.err
    npz("wrong.npz", labels=numpy.arange(16) + 100)
    answer = sparsebit(*PRUNE, "-d", "wrong.npz")
    assert answer.json["accuracy"] is None and "no accuracy: 16 of 16 samples in wrong.npz" in answer.err


def test_metrics(sparsebit: Sparsebit, labelled: Path) -> None:
    told = sparsebit(*BYTES, "--metric", "own_project:mean").json["accuracy"]
    assert told["metric"] == "own_project:mean" and told["float"]["score"] != told["simulation"]["score"]
    told = sparsebit(*BYTES, "--metric", "agreement", "--test-data", "own_project:batches").json["accuracy"]
    assert told["float"]["score"] == 1.0 and told["num_samples"] == 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--test-samples", "3"), "needs --test-data"),
        (("--metric", "acuracy", "--test-data", "x.npz"), "write accuracy, agreement or MODULE:FUNCTION"),
        (("--metric", "agreement"), "agreement is measured on data; give --test-data"),
        (("--test-data", "own_project:batches"), "a batch has no labels"),
        (("--test-data", "missing.npz"), "there is no such file"),
    ],
)
def test_what_is_refused_before_the_work(
    sparsebit: Sparsebit, labelled: Path, options: tuple[str, ...], message: str
) -> None:
    answer = sparsebit(*BYTES, *options)
    assert answer.code in (1, 2) and message in " ".join(answer.err.split()) and not Path("int8").exists()
