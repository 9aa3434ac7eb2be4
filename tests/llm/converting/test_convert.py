"""`convert` between file formats: the same logits, and back to the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebit.errors import ConfigError, DeploymentError
from sparsebit.folders import staging_folder
from sparsebit.llm import Calibration, Recipe, convert, load, quantize
from sparsebit.llm.converting import convert as converting
from sparsebit.llm.converting import load_check as load_check_module
from tests.llm.tiny_models import saved, tiny_model, with_tokenizer, write_text

TOKENS = torch.arange(3, 35)[None]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Packed in 4 bits, without zero points."""
    folder = saved(tiny_model("qwen2"), tmp_path / "model")
    recipe = Recipe(method="rtn", scale_search="none", group_size=32, symmetric=True)
    return quantize(folder, tmp_path / "packed", recipe, check=False).folder


@pytest.mark.parametrize("kind", ["gptq", "gptq-v1"])
def test_there_and_back(source: Path, kind: str) -> None:
    made = convert(source, source.parent / "gptq", kind)
    assert made.check is not None and made.check.difference <= 1e-3
    assert len(made.formats) == 21
    config = json.loads((made.output / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "gptq" and config["sym"]
    with torch.no_grad():
        found, expected = (load(folder)(TOKENS).logits for folder in (made.output, source))
    assert torch.equal(found, expected)
    back = convert(made.output, source.parent / "back", "compressed-tensors", check=False)
    for path in source.glob("*.safetensors"):
        assert path.read_bytes() == (back.output / path.name).read_bytes()


def test_compressed_tensors_are_checked_by_transformers(source: Path) -> None:
    pytest.importorskip("compressed_tensors")
    made = convert(source, source.parent / "gptq", "gptq", check=False)
    back = convert(made.output, source.parent / "back", "compressed-tensors")
    assert back.check is not None and back.check.reader == "transformers" and back.check.vllm == ()


def test_3_bits_with_zero_points(tmp_path: Path) -> None:
    folder = saved(tiny_model(), tmp_path / "model")
    recipe = Recipe(method="rtn", scale_search="none", group_size=32, bits=3)
    packed = quantize(folder, tmp_path / "packed", recipe, check=False).folder
    made = convert(packed, tmp_path / "gptq", "gptq")
    assert made.check is not None and made.check.difference <= 1e-3


def test_mixed_bits(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    folder = with_tokenizer(saved(tiny_model(), tmp_path / "model"))
    recipe = Recipe(method="rtn", group_size=32, candidate_bits=(2, 4), average_bits=3.0)
    text = Calibration(tmp_path / "text.txt", num_samples=6, length=24)
    packed = quantize(folder, tmp_path / "packed", recipe, text, check=False).folder
    with pytest.raises(DeploymentError, match="different number formats"):
        convert(packed, tmp_path / "gptq", "gptq")
    made = convert(packed, tmp_path / "gptq", "gptq", check=False)
    assert len({*made.formats.values()}) == 2
    with torch.no_grad():
        found, expected = (load(folder)(TOKENS).logits for folder in (made.output, packed))
    assert torch.equal(found, expected)


def test_another_run_to_the_same_output(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, before = source.parent / "gptq", sorted(source.parent.iterdir())
    with staging_folder(target), pytest.raises(ConfigError, match="another process is writing"):
        convert(source, target, "gptq", check=False)
    assert sorted(source.parent.iterdir()) == before
    write = converting._write

    def slow(*args: Any) -> None:
        write(*args)
        target.mkdir()
        (target / "theirs").touch()

    monkeypatch.setattr(converting, "_write", slow)
    with pytest.raises(ConfigError, match="gptq was created by something else during this run"):
        convert(source, target, "gptq", check=False)
    assert [path.name for path in target.iterdir()] == ["theirs"]
    assert sorted(source.parent.iterdir()) == sorted([*before, target])


def test_a_gguf_file_of_another_run_is_kept(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    target = source.parent / "model.gguf"

    def write(made: Path, *_: Any) -> list[Any]:
        made.write_text("ours")
        target.write_text("theirs")
        return []

    monkeypatch.setattr(converting, "write_gguf", write)
    with pytest.raises(ConfigError, match=r"model\.gguf was created by something else"):
        convert(source, target, "gguf", check=False)
    assert target.read_text() == "theirs"


def test_what_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="format='exl2': allowed: compressed-tensors, gptq, gptq-v1, awq, gguf"):
        convert(source, source.parent / "x", "exl2")
    with pytest.raises(ConfigError, match="exists"):
        convert(source, source, "gptq")
    with pytest.raises(ConfigError, match="float model"):
        convert(source.parent / "model", source.parent / "x", "gptq")
    monkeypatch.setattr(load_check_module, "relative_difference", lambda *_: 0.5)
    with pytest.raises(DeploymentError, match=r"differ by 0\.5"):
        convert(source, source.parent / "x", "gptq")
    assert not (source.parent / "x").exists()
