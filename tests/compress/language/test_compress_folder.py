"""A search for a tiny random model: files of each kind, the same bits after a stop, and input that is wrong."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import sparsebit
from sparsebit.cli.main import app
from sparsebit.compress.climbing.result import Result
from sparsebit.compress.language.compress_folder import command
from sparsebit.compress.language.recipe import LanguageRecipe
from sparsebit.errors import ConfigError
from sparsebit.llm import Calibration, load
from tests.llm.tiny_models import saved, tiny_model, with_bpe, write_text

pytest.importorskip("compressed_tensors")

FAST = ("eight bits", "four bits")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_text(folder / "text.txt")
    (folder / "held.txt").write_text((folder / "text.txt").read_text()[::-1])
    return with_bpe(saved(tiny_model(vocab_size=264, bos_token_id=257, eos_token_id=258), folder / "model"))


def compressed(source: Path, folder: Path, target: str = "transformers", **given: Any) -> Result:
    texts = source.parent
    how: dict[str, Any] = {"rungs": FAST, "validation": texts / "held.txt", "minutes": 5, **given}
    data = how.pop("data", Calibration(texts / "text.txt", num_samples=8, length=48))
    return sparsebit.compress(str(source), data, target, folder=folder, **how)


def contents(folder: Path | None) -> dict[str, bytes]:
    """The weights of a model folder."""
    assert folder is not None
    found = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    assert found
    return found


def test_the_smallest_that_keeps_the_loss(source: Path, tmp_path: Path) -> None:
    found = compressed(source, tmp_path / "run", max_loss=50.0)
    assert found.met and found.ladder.best == "02-w4-gptq"
    eight, four = (step.cost for step in found.steps)
    assert eight and four and four.num_bytes < eight.num_bytes and four.bits == pytest.approx(4 + 20 / 64, abs=0.01)
    assert found.ladder.float_cost is not None and found.ladder.float_cost.bits == pytest.approx(16, abs=0.5)
    ids = torch.arange(40, 60)[None]
    assert found.file is not None
    with torch.no_grad():
        assert torch.equal(load(found.file)(ids).logits, found.model(ids).logits)


@pytest.mark.slow
def test_a_loss_that_nothing_keeps(source: Path, tmp_path: Path) -> None:
    found = compressed(source, tmp_path / "run", metric="kl", max_loss=1e-9)
    assert not found.met and found.file is not None
    assert "lose more than 1e-09" in found.reason and "Next: allow more bits" in found.reason


def test_a_budget_of_bits(source: Path, tmp_path: Path) -> None:
    found = compressed(source, tmp_path / "run", budget={"bits": 5})
    assert [step.verdict for step in found.steps] == ["over budget", "within"]
    assert found.met and found.steps[0].selection is None  # what is over the budget is not judged


def test_a_file_of_llama_cpp(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    found = compressed(source, tmp_path / "run", "llama.cpp", rungs=("four bits",), max_loss=50.0)
    assert found.file is not None and found.file.name == "best.gguf" and found.file.read_bytes()[:4] == b"GGUF"
    assert found.steps[0].cost is not None and found.steps[0].cost.num_bytes == found.file.stat().st_size


@pytest.mark.slow
def test_a_stopped_run_goes_on(source: Path, tmp_path: Path) -> None:
    def stop(ladder: Any) -> None:
        if len(ladder.steps) == 1 and not ladder.finished:
            raise KeyboardInterrupt

    whole = compressed(source, tmp_path / "whole", max_loss=50.0)
    with pytest.raises(KeyboardInterrupt):
        compressed(source, tmp_path / "run", max_loss=50.0, show=stop)
    again = compressed(source, tmp_path / "run", max_loss=50.0)
    assert [step.name for step in again.steps] == [step.name for step in whole.steps]
    assert contents(whole.file) == contents(again.file)
    with pytest.raises(ConfigError, match="another model, other data or another goal"):
        compressed(source, tmp_path / "run", max_loss=40.0)


def test_the_line_that_makes_it_again(source: Path, tmp_path: Path) -> None:
    found = compressed(source, tmp_path / "run", max_loss=50.0)
    words = shlex.split(found.ladder.reproduce)
    assert words[:3] == ["sparsebit", "llm", "quantize"]
    made = CliRunner().invoke(app, [*words[1:-1], str(tmp_path / "again"), "-q"])
    assert made.exit_code == 0, made.output
    assert contents(tmp_path / "again") == contents(found.file)


def test_options_of_every_kind_in_the_line() -> None:
    recipe = LanguageRecipe("genai", {"candidate_bits": (2, 4), "average_bits": 3.0, "symmetric": True})
    line = command(Path("my model"), recipe, Calibration([Path("a b.txt")], length=64))
    assert "'my model' --for genai --text 'a b.txt'" in line
    assert "--candidate-bits 2,4 --average-bits 3.0 --symmetric --length 64" in line


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": "onnxruntime"}, "allowed for a language model: llama.cpp, vllm, transformers, genai"),
        ({"validation": None}, "judged on text that it was not calibrated on"),
        ({"metric": "top1"}, "allowed for language models: perplexity, kl"),
        ({"data": [torch.zeros(2)]}, "calibrated on text files"),
        ({"budget": {"latency": 0.5}}, "allowed for language models: bytes, bits"),
        ({"rungs": ("ranges",)}, "eight bits"),
        ({"data": Calibration(Path("text.txt"), length=100_000)}, "windows of 100000 tokens"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str, source: Path, tmp_path: Path) -> None:
    if isinstance(given.get("data"), Calibration):
        given = {"data": Calibration(source.parent / "text.txt", length=100_000)}
    with pytest.raises(Exception, match=message) as caught:
        compressed(source, tmp_path / "run", **given)
    assert isinstance(caught.value, sparsebit.errors.SparsebitError)


def test_the_held_out_text_is_not_calibrated_on(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is also calibrated on"):
        compressed(source, tmp_path / "run", validation=source.parent / "text.txt")


def test_the_command(source: Path, tmp_path: Path) -> None:
    texts = source.parent
    words = ["llm", "compress", source, "--text", texts / "text.txt", "--heldout", texts / "held.txt"]
    how = ["--length", 48, "--num-samples", 8, "--max-loss", 50, "--rungs", "eight bits", "-o", tmp_path / "run"]
    made = CliRunner().invoke(app, [str(word) for word in (*words, *how)])
    assert made.exit_code == 0, made.output
    assert "01-w8" in made.stdout and "8.38" in made.stdout and (tmp_path / "run/best").is_dir()


@pytest.mark.slow
def test_a_trained_model_in_four_bits(shared_data: Path, tmp_path: Path) -> None:
    texts = shared_data / "text"
    found = sparsebit.compress(
        shared_data / "book_llama",
        Calibration(texts / "books_calibration.txt", num_samples=32),
        "transformers",
        validation=texts / "books_heldout.txt",
        max_loss=2.0,
        rungs=("four bits",),
        minutes=15,
        folder=tmp_path / "run",
    )
    (step,) = found.steps
    assert found.met and step.final is not None and step.cost is not None
    assert step.final.loss < 2.0 and step.cost.bytes_ratio < 0.45
