"""`sparsebit profile`: the table of errors."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import sparsebit as package
from sparsebit.cli.verbs.profile import error_table
from sparsebit.records import Coverage, LayerError, QuantizedLayer
from tests.cli.conftest import Sparsebit

COMMAND = ("profile", "--model", "own_project:Net", "--data", "own_project:batches")


def test_worst_first(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMMAND, "-c", "virtual", "--device", "cpu", "--json")
    assert answer.code == 0, answer.err
    layers = answer.json["layers"]
    assert {"stem.0", "body.0", "head"} <= {layer["layer"] for layer in layers}
    assert [layer["sqnr_db"] for layer in layers] == sorted(layer["sqnr_db"] for layer in layers)
    assert answer.json["num_layers"] == len(layers) and answer.json["output_sqnr_db"] > 25


def test_table(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMMAND, "-c", "virtual", "--device", "cpu", "--top", 1, "--sync", "--quiet")
    assert answer.code == 0 and "all layers quantized together" in answer.out
    assert answer.out.count(" dB") == 2  # the output's and one layer's
    assert "better ones (--top 0 shows all)" in answer.out and "calibrating" not in answer.err


def test_saved_model_brings_its_own_weights(sparsebit: Sparsebit, project: Path) -> None:
    saved = sparsebit("quantize", *COMMAND[1:], "--device", "cpu", "-o", "saved", "--json").json
    Path("own_project.py").write_text(Path("own_project.py").read_text().replace("manual_seed(0)", "manual_seed(9)"))
    answer = sparsebit(*COMMAND, "--quantized", "saved", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["output_sqnr_db"] == pytest.approx(saved["output_sqnr_db"], abs=0.1)
    assert answer.json["backend"] == "onnxruntime"


@pytest.mark.slow
def test_it_says_what_errors_are_counted_from(sparsebit: Sparsebit, project: Path) -> None:
    config = "{DEVICE: cpu, BACKEND: virtual, W: {QUANTIZER: {BIT: 3}}, A: {QUANTIZER: {BIT: 8}}, ALGORITHMS: [gptq]}"
    Path("w3.yaml").write_text(config)
    made = sparsebit("quantize", *COMMAND[1:], "-c", "w3.yaml", "-o", "saved", "--json").json
    own = sparsebit(*COMMAND, "--quantized", "saved", "--json").json
    assert own["compared_with"] == dict.fromkeys(("output", "layers"), "the weights that gptq left")
    assert own["output_sqnr_db"] > made["output_sqnr_db"] + 6  # the rounding of the weights is not in it
    import own_project

    torch.save(own_project.Net().state_dict(), "float.pt")
    answer = sparsebit(*COMMAND, "--quantized", "saved", "--weights", "float.pt", "--json")
    assert answer.json["output_sqnr_db"] == pytest.approx(made["output_sqnr_db"], abs=0.1)
    assert answer.json["compared_with"] == {"output": "the float model", "layers": "the weights that gptq left"}
    table = " ".join(sparsebit(*COMMAND, "--quantized", "saved", "--quiet").out.split())
    assert "dB against the weights that gptq left; below, each layer quantized alone, against the weights" in table
    plain = sparsebit(*COMMAND, "-c", "virtual", "--device", "cpu", "--quiet").out
    assert "against" not in plain


@pytest.mark.parametrize("option", [["--asym"], ["--config", "virtual"], ["--device", "cpu"]], ids=" ".join)
def test_saved_model_has_its_config(sparsebit: Sparsebit, project: Path, option: list[str]) -> None:
    answer = sparsebit(*COMMAND, "--quantized", "saved", *option)
    assert answer.code == 2 and "a saved model has its config" in answer.err


def test_no_saved_model(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*COMMAND, "--quantized", "nowhere")
    assert answer.code == 1 and "nowhere holds no sparsebit.json" in answer.err


def test_errors_are_those_of_the_model() -> None:
    model, x = nn.Linear(6, 5).eval(), torch.randn(16, 6)
    qmodel = package.quantize(
        model, [x], {"DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": 4}}, "A": {"QUANTIZER": {"BIT": 4}}}
    )
    (error,) = qmodel.profile([x]).layers
    with torch.no_grad():
        noise, signal = (qmodel(x) - model(x)).square().mean().item(), model(x).square().mean().item()
    assert error.error == pytest.approx(noise, rel=1e-4)
    assert error.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-3)


def test_table_shows_formats_and_odd_names() -> None:
    coverage = Coverage(
        quantized=(
            QuantizedLayer("conv[0]", "QConv2d", {"input": "uint8", "weight": "int4", "output": "int8"}),
            QuantizedLayer("add", "QIdentity", {"input.0": "uint8", "input.1": "int8"}),
        )
    )
    errors = [
        LayerError("conv[0]", 0.5, 3.0),
        LayerError("add", 0.25, 9.0),
        LayerError("conv[0].output", 0.1, 20.0),
        LayerError("exact", 0.0, math.inf),
        LayerError("dead", 1.0, -math.inf),
    ]
    console = Console(width=100, file=None, record=True, quiet=False)
    with console.capture() as captured:
        console.print(error_table(errors, coverage))
    rows = {cells[0]: cells[1:] for line in captured.get().splitlines() if (cells := line.split())}
    assert rows["conv[0]"][:5] == ["int4", "uint8", "0.5", "3.0", "dB"]
    assert rows["add"][:4] == ["-", "uint8,", "int8", "0.25"]
    assert rows["conv[0].output"][:3] == ["-", "int8", "0.1"]
    assert rows["exact"][3] == "exact" and rows["dead"][3:5] == ["no", "signal"]


CLASSES = """

def labelled():
    for x in batches():
        with torch.no_grad():
            yield x, Net().eval()(x).argmax(1)


def score(model):
    return -float((model(stored[0]) - net(stored[0])).square().mean())


def refuses(model):
    raise ValueError("no test set")
"""


@pytest.fixture
def labelled(project: Path) -> Path:
    """The project with labels: of a factory, in a file, and as folders."""
    import numpy as np
    from PIL import Image

    with Path("own_project.py").open("a") as file:
        file.write(CLASSES)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (20, 8, 8, 3), dtype=np.uint8)
    np.savez("test.npz", images=images, labels=np.arange(20) % 10)
    for place, pixels in enumerate(images):
        for folder, name in (("words", f"kind{place % 10}"), ("numbers", str(place % 10)), ("few", f"kind{place % 3}")):
            Path(folder, name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(Path(folder, name, f"{place}.png"))
    return project


GAINS = (*COMMAND, "-c", "virtual", "--device", "cpu", "--gains", "2")


class TestGains:
    def test_labels_of_a_factory(self, sparsebit: Sparsebit, labelled: Path) -> None:
        answer = sparsebit(*GAINS, "--test-data", "own_project:labelled", "--json", "--record", "r.json")
        assert answer.code == 0, answer.err
        gains = answer.json["gains"]
        assert gains["metric"] == "top-1 accuracy" and gains["num_samples"] == 24 and gains["float_score"] == 1.0
        assert len(gains["layers"]) == 2 and {"layer", "score", "gain", "sqnr_db"} <= gains["layers"][0].keys()
        (errors,) = package.read_record("r.json").errors
        assert errors.gains is not None and errors.gains.float_score == 1.0

    @pytest.mark.parametrize(
        "source", [["test.npz"], ["words", "--size", "8"], ["numbers", "--size", "8"]], ids=["npz", "words", "numbers"]
    )
    def test_labels_of_files(self, sparsebit: Sparsebit, labelled: Path, source: list[str]) -> None:
        answer = sparsebit("profile", "-m", "own_project:Net", "-d", *source, "--gains", "2", "--json", "--top", "1")
        assert answer.code == 0, answer.err
        x = torch.from_numpy(__import__("numpy").load("test.npz")["images"]).permute(0, 3, 1, 2).float() / 255
        expected = float((__import__("own_project").Net().eval()(x).argmax(1) == torch.arange(20) % 10).float().mean())
        assert answer.json["gains"]["float_score"] == pytest.approx(expected)

    def test_table_says_what_is_measured(self, sparsebit: Sparsebit, labelled: Path) -> None:
        answer = sparsebit(*GAINS, "--metric", "agreement", "--test-samples", "8")
        assert answer.code == 0, answer.err
        assert "top-1 agreement with the float model (no labels) on 8 samples: float 1.0000" in answer.out
        assert "these 2 together" in answer.out and "in float" in answer.out

    def test_a_function(self, sparsebit: Sparsebit, labelled: Path) -> None:
        answer = sparsebit(*GAINS, "--metric", "own_project:score", "--json")
        assert answer.code == 0, answer.err
        assert answer.json["gains"]["metric"] == "own_project:score" and answer.json["gains"]["quantized_score"] <= 0

    @pytest.mark.sample(4)
    @pytest.mark.parametrize(
        ("options", "told"),
        [
            (["--gains", "2"], "batch 0 has no labels"),
            (
                ["--gains", "2", "--test-data", "few", "--size", "8"],
                "3 folders, and the model has scores of 10 classes",
            ),
            (["--gains", "2", "--test-data", "words/kind1", "--size", "8"], "is not in the folder of a class"),
            (["--gains", "2", "--test-data", "none.npz"], "exactly one array of labels (`labels` or `y`) is required"),
            (["--gains", "2", "--test-data", "floats.npz"], "is not the number of the class"),
            (["--gains", "2", "--metric", "top5"], "metric='top5': allowed"),
            (["--gains", "2", "--metric", "own_project:refuses"], "no test set"),
        ],
        ids=["no labels", "other classes", "no folders", "no array", "floats", "metric", "function"],
    )
    def test_faults(self, sparsebit: Sparsebit, labelled: Path, options: list[str], told: str) -> None:
        import numpy as np

        images = np.load("test.npz")["images"]
        np.savez("none.npz", images=images)
        np.savez("floats.npz", images=images, y=np.linspace(0, 1, 20))
        command = ("profile", "-m", "own_project:Net", "-d", "words") if "--size" in options else COMMAND
        answer = sparsebit(*command, "-c", "virtual", "--device", "cpu", *options)
        assert answer.code == 1 and told in " ".join(answer.err.split())

    def test_options_that_would_do_nothing(self, sparsebit: Sparsebit, labelled: Path) -> None:
        answer = sparsebit(*COMMAND, "--metric", "agreement")
        assert answer.code == 2 and "--gains" in answer.err
