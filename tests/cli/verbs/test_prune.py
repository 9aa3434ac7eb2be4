"""`sparsebit prune`: a folder that rebuilds from the original class, sizes before and after, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from sparsebit.cli.inputs.loading import load_model
from sparsebit.errors import CheckpointError
from sparsebit.report import read_run
from sparsebit.sparse import load
from tests.cli.conftest import Sparsebit
from tests.sparse.fake_runtime import ByMultiplications, layer_sizes

MODEL = ("prune", "--model", "own_project:Net", "--device", "cpu", "-o", "small")
DATA = ("--data", "own_project:batches")


@pytest.mark.slow
@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("how", [("--ratio", "0.5"), ("--ratio", "0.5", *DATA), ("--budget", "macs=0.6", *DATA)])
def test_the_folder_rebuilds_from_the_original_class(sparsebit: Sparsebit, project: Path, how: tuple[str, ...]) -> None:
    if "--budget" in how:
        pytest.importorskip("scipy")
    answer = sparsebit(*MODEL, *how, "--json")
    assert answer.code == 0, answer.err
    told = answer.json
    assert told["after"]["macs"] < 0.8 * told["before"]["macs"] and told["units"]["removed"] > 0
    assert (told["output_sqnr_db"]["pruned"] is not None) == ("--data" in how)
    small = load("small", load_model("own_project:Net"))
    assert sum(p.numel() for p in small.parameters()) == told["after"]["parameters"]
    if "--budget" in how:
        assert told["after"]["macs"] <= 0.6 * told["before"]["macs"] and told["ratios"]
        assert told["round_to"] == 16 and "multiples of 16 where they were, which kernels like" in answer.err


@pytest.mark.slow
def test_a_budget_of_latency_is_measured(sparsebit: Sparsebit, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("scipy", "onnxruntime"):
        pytest.importorskip(package)
    monkeypatch.setattr("sparsebit.sparse.budgets.latency_table.onnx_bytes", layer_sizes)
    monkeypatch.setattr("sparsebit.sparse.budgets.latency_table.Stopwatch", lambda *_: ByMultiplications())
    answer = sparsebit(*MODEL, *DATA, "--budget", "latency=0.6", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["latency"]["asked"] == 0.6 and answer.json["latency"]["ratio"] < 0.7
    assert "of the dense model's" in sparsebit(*MODEL, *DATA, "--budget", "latency=0.6").out


@pytest.mark.usefixtures("untimed")
def test_a_table_is_shown(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*MODEL, "--ratio", "0.5", *DATA)
    assert answer.code == 0, answer.err
    assert all(word in answer.out for word in ("MACs", "parameters", "bytes", "time", "removed", "saved"))


@pytest.mark.slow
def test_the_time_of_both_models_is_measured(sparsebit: Sparsebit, project: Path) -> None:
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    time = sparsebit(*MODEL, "--ratio", "0.5", "--json").json["time"]
    assert time["ratio"] > 0 and time["dense_ms"] > 0 and time["small_ms"] > 0 and not time["reason"]
    assert time["is_faster"] == (time["ratio"] <= 0.97)


def test_the_next_command_repeats_the_model_and_the_data(sparsebit: Sparsebit, project: Path) -> None:
    pytest.importorskip("numpy").savez("images.npz", x=torch.rand(16, 8, 8, 3).mul(255).byte().numpy())
    given = ("--model-args", '{"classes": 5}', "--batch-size", "8", "--mean", "0.5,0.4,0.4")
    answer = sparsebit(*MODEL, *given, "--ratio", "0.5", "--data", "images.npz")
    assert answer.code == 0, answer.err
    assert answer.err.splitlines()[-1] == (
        "next: sparsebit quantize -m own_project:Net --model-args '{\"classes\": 5}' -w small -d images.npz "
        "--mean 0.5,0.4,0.4 --batch-size 8 -o FILE.onnx"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("untimed")
def test_prune_quantize_check(sparsebit: Sparsebit, project: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    net = ("-m", "own_project:Net", "-w")
    assert sparsebit(*MODEL, "--ratio", "0.5").code == 0
    answer = sparsebit("quantize", *net, "small/", *DATA, "-o", "int8", "-o", "int8.onnx", "--no-check", "--json")
    assert answer.code == 0, answer.err
    assert answer.err.startswith("weights: small, a pruned model\n") and answer.json["output_sqnr_db"] > 30
    for weights in (("small", "--against", "int8", "--exact"), ("small/model.safetensors", "--min-sqnr", "30")):
        answer = sparsebit("check", "int8.onnx", *DATA, *net, *weights)
        assert answer.code == 0, answer.err
    answer = sparsebit("prune", *net, "small", "--ratio", "0.5", "-o", "smaller", "--json")
    assert answer.code == 0 and answer.json["before"]["parameters"] == 318 > answer.json["after"]["parameters"]


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("weights", ["small/", "small/model.safetensors"])
def test_every_verb_takes_a_pruned_folder(
    sparsebit: Sparsebit, project: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    assert sparsebit(*MODEL, "--ratio", "0.5").code == 0
    loaded = []

    def stop(folder: Path, model: nn.Module) -> None:
        loaded.append(folder)
        raise CheckpointError("enough")

    monkeypatch.setattr("sparsebit.sparse.load", stop)
    net = ("-m", "own_project:Net", "-w", weights)
    verbs: list[tuple[str, ...]] = [
        ("quantize", *net, *DATA, "-o", "int8"),
        ("quantize", *net, "-c", "weights-only", "-o", "int8"),
        ("check", "int8.onnx", *DATA, *net),
        ("check", "int8.onnx", *DATA, *net, "--against", "small"),
        ("export", "int8", *DATA, *net, "-o", "int8.onnx"),
        ("export", *DATA, *net, "-o", "float.onnx"),
        ("profile", *DATA, *net),
        ("profile", *DATA, *net, "--quantized", "int8"),
        ("search", *DATA, *net, "--budget", "weight_bits=6", "-o", "mixed.yaml"),
        ("prune", *DATA, *net, "--ratio", "0.5", "-o", "smaller"),
        ("graph", *net),
        ("config", "check", "virtual", *net),
    ]
    monkeypatch.setattr("sparsebit.cli.verbs.check.runtime_of", lambda file: "onnxruntime")
    for verb in verbs:
        answer = sparsebit(*verb)
        assert answer.code == 1 and f"--weights {Path(weights)}: enough" in answer.err, (verb, answer.err)
    assert loaded == [Path("small")] * len(verbs)


@pytest.mark.usefixtures("untimed")
def test_folders_that_do_not_fit(sparsebit: Sparsebit, project: Path) -> None:
    assert sparsebit(*MODEL, "--ratio", "0.5").code == 0
    net = ("-m", "own_project:Net")
    int8 = ("quantize", *net, "-c", "weights-only", "-o", "int8")
    assert sparsebit(*int8, "-w", "small").code == 0
    answer = sparsebit("export", "int8", *net, "--size", "8", "-o", "out.onnx")
    assert (
        answer.code == 1 and "quantized from a pruned model, give the folder of that too: --weights DIR" in answer.err
    )
    assert "is the folder of a quantized model" in sparsebit(*int8, "-w", "int8").err
    assert "a folder that sparsebit prune wrote" in sparsebit(*int8, "-w", ".").err
    assert "is of another model" in sparsebit(*int8, "-m", "own_project:Optional", "-w", "small").err
    Path("small/model.safetensors").rename("alone.safetensors")
    assert "give the folder that sparsebit prune wrote" in sparsebit(*int8, "-w", "alone.safetensors").err
    assert "model.safetensors cannot be read" in sparsebit(*int8, "-w", "small").err


@pytest.mark.usefixtures("untimed")
def test_configs_are_read(sparsebit: Sparsebit, project: Path) -> None:
    Path("sconfig.yaml").write_text("SPARSER: {TYPE: structed, STRATEGY: l2norm, RATIO: 0.25}\n")
    answer = sparsebit(*MODEL, "-c", "sconfig.yaml", "--json")
    assert answer.code == 0, answer.err
    share = answer.json["units"]["removed"] / answer.json["units"]["removable"]
    assert share == pytest.approx(0.25, abs=0.1)


def test_what_makes_no_sense_is_refused(sparsebit: Sparsebit, project: Path) -> None:
    assert "how much should be removed" in " ".join(sparsebit(*MODEL).err.split())
    assert "chosen on data" in " ".join(sparsebit(*MODEL, "--budget", "macs=0.5").err.split())
    assert "give --ratio, or --budget" in " ".join(
        sparsebit(*MODEL, *DATA, "--ratio", "0.5", "--budget", "macs=0.5").err.split()
    )
    answer = sparsebit(*MODEL, "--ratio", "0.5", "--strategy", "l1nrm")
    assert answer.code == 1 and "l1norm" in answer.err
    Path("sconfig.yaml").write_text("SPARSER: {TYPE: unstructed, RATIO: 0.25}\n")
    answer = sparsebit(*MODEL, "-c", "sconfig.yaml")
    assert answer.code == 1 and "TYPE: structured" in answer.err
    Path("small").mkdir()
    Path("small/mine.txt").write_text("mine")
    answer = sparsebit(*MODEL, "--ratio", "0.5")
    assert answer.code == 1 and "something else" in answer.err and Path("small/mine.txt").exists()


def test_a_model_from_which_nothing_goes_is_an_error(sparsebit: Sparsebit, project: Path) -> None:
    with Path("own_project.py").open("a") as file:
        file.write("\n\ndef one_layer():\n    return nn.Sequential(nn.Linear(6, 3))\n")
    answer = sparsebit(*MODEL, "--ratio", "0.01")
    assert answer.code == 1 and "nothing is removed" in answer.err and not Path("small").exists()
    Path("sconfig.yaml").write_text("SPARSER: {RATIO: 0.5, SPARE: ['*']}\n")
    answer = sparsebit(*MODEL, "-c", "sconfig.yaml")
    assert answer.code == 1 and "nothing is removed" in answer.err
    answer = sparsebit("prune", "--model", "own_project:one_layer", "--device", "cpu", "-o", "small", "--ratio", "0.5")
    assert answer.code == 1 and "no channels, heads or neurons can be removed" in " ".join(answer.err.split())


@pytest.mark.usefixtures("untimed")
def test_the_folder_holds_what_was_measured_for_the_page(sparsebit: Sparsebit, project: Path) -> None:
    told = sparsebit(*MODEL, "--ratio", "0.5", *DATA, "--json").json
    run = read_run("small")
    cards = {card.label: card for card in run.cards}
    assert cards["Multiplications"].share == pytest.approx(told["after"]["macs"] / told["before"]["macs"])
    assert f"{told['output_sqnr_db']['reconstructed']:.1f} dB" == cards["Output SQNR"].value
    kept = {layer.name: layer.kept for layer in run.layers}
    assert kept["stem.0"] == 0.5 and run.drawing is not None and "add" in [layer.op for layer in run.layers]
