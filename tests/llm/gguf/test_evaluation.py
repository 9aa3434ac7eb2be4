"""`sparsebit llm eval FILE.gguf`: llama.cpp's perplexity is that of the packed model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from sparsebit.errors import CheckpointError, DeploymentError, MissingExtraError
from sparsebit.llm import convert, load, perplexity, quantize, recipe_for, token_stream, windows
from sparsebit.llm.gguf.evaluation import _compare, gguf_perplexity
from sparsebit.llm.models.hub_classes import load_tokenizer
from tests.llm.tiny_models import saved, tiny_model, with_bpe

pytest.importorskip("gguf")


def gguf_file(tmp_path: Path, model_type: str = "llama") -> Path:
    model = tiny_model(model_type, vocab_size=264, bos_token_id=257, eos_token_id=258, num_hidden_layers=1)
    folder = with_bpe(saved(model, tmp_path / "model"))
    recipe = recipe_for("llama.cpp", method="rtn", scale_search="none")
    packed = quantize(folder, tmp_path / "packed", recipe, check=False).folder
    return convert(packed, tmp_path / "model.gguf", "gguf", check=False).output


@pytest.mark.parametrize("model_type", ["llama", "phi"])
def test_llama_cpp_computes_our_perplexity(model_type: str, tmp_path: Path) -> None:
    """Phi has an output layer with a bias."""
    pytest.importorskip("xllamacpp")
    text = tmp_path / "text.txt"
    text.write_text("Das Schiff verließ den Hafen, and the crew sang. " * 12, encoding="utf-8")
    found = gguf_perplexity(gguf_file(tmp_path, model_type), text, 48, 6)
    tokens = windows(token_stream(text, load_tokenizer(tmp_path / "packed")), 48, 6)
    wanted = perplexity(load(tmp_path / "packed", dtype=torch.float32), tokens)
    assert (found.num_windows, found.num_predictions) == (wanted.num_windows, wanted.num_predictions)
    assert found.value == pytest.approx(wanted.value, rel=0.01)


def test_what_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, text = tmp_path / "model.gguf", tmp_path / "text.txt"
    text.write_text("abc")
    file.write_bytes(b"not a GGUF file")
    with pytest.raises(CheckpointError, match="cannot be read as a GGUF file"):
        gguf_perplexity(file, text, 8)
    file.unlink()
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(MissingExtraError, match="pip install xllamacpp"):
        gguf_perplexity(gguf_file(tmp_path), text, 8)


def test_logits_that_are_changed_further_are_noticed() -> None:
    found = torch.tensor([0.1, 0.9]).log()
    _compare(found, {1: float(found[1]) + 0.1}, Path("model.gguf"))
    with pytest.raises(DeploymentError, match=r"differ by 0\.5"):
        _compare(found, {1: float(found[1]) + 0.5}, Path("model.gguf"))
