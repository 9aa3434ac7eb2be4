"""`convert` to ONNX Runtime GenAI: the runtime computes the logits of the packed model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsebit.errors import DeploymentError, MissingExtraError
from sparsebit.llm import Recipe, convert, load, quantize
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.converting import genai_folder
from sparsebit.llm.converting.genai_folder import builder_tensors, warn_of_tokens, why_not
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.llm.models.hub_classes import load_tokenizer
from sparsebit.numerics.packing import unpack
from tests.llm.tiny_models import saved, tiny_model, with_bpe

# The builder runs in a process of its own, where torchvision has to be importable too.
SITE = "from tests import torchvision_shim\ntorchvision_shim.install()\n"


def packed_folder(tmp_path: Path, model_type: str = "llama", *, is_tied: bool = False, **options: Any) -> Path:
    model = tiny_model(model_type, vocab_size=264, bos_token_id=257, eos_token_id=258, tie_word_embeddings=is_tied)
    folder = with_bpe(saved(model, tmp_path / "model"))
    recipe = Recipe(method="rtn", scale_search="none", **{"group_size": 32, **options})
    return quantize(folder, tmp_path / "packed", recipe, check=False).folder


def importable_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def with_first_token(folder: Path) -> Path:
    """The tokenizer of `with_bpe`, which begins each text with `<s>`."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer.from_file(str(with_bpe(folder) / "tokenizer.json"))
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    made.save_pretrained(folder)
    return folder


def guide_lines() -> str:
    """The program of the guide that runs a folder with ONNX Runtime GenAI."""
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "llm-serve.md").read_text(encoding="utf-8")
    return re.findall(r'python -c "\n(import onnxruntime_genai.*?)"\n', guide, re.DOTALL)[0]


@pytest.mark.slow  # the package that builds the folder takes a minute
def test_the_lines_of_the_guide_write_the_text_of_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("onnxruntime_genai")
    importable_torchvision(tmp_path, monkeypatch)
    model = tiny_model(vocab_size=264, bos_token_id=257, eos_token_id=258, num_hidden_layers=1)
    folder = with_first_token(saved(model, tmp_path / "model"))
    tokenizer = load_tokenizer(folder)
    letters = torch.tensor([token for token in range(257) if tokenizer.decode([token]).isalnum()])
    with torch.no_grad():  # letters only: parts of characters are shown in different ways
        kept = torch.zeros(264, 1).index_fill_(0, letters[letters != 256], 1.0)
        model.lm_head.weight.mul_(kept)
    saved(model, folder)
    packed = quantize(
        folder, tmp_path / "packed", Recipe(method="rtn", scale_search="none", group_size=32), check=False
    )
    made = convert(packed.folder, tmp_path / "llama-w4-onnx", "onnx-genai")
    assert made.check is not None and made.check.difference <= 1e-3
    assert "splits" not in caplog.text
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", guide_lines()]
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    prompt = tokenizer("The ship left the harbour", return_tensors="pt")
    wanted = load(packed.folder, dtype=torch.float32).generate(**prompt, max_length=64, do_sample=False)[0]
    assert wanted[0] == 257 and len(wanted) == 64
    assert shown.strip().removeprefix("<s>") == tokenizer.decode(wanted, skip_special_tokens=True)


@pytest.mark.parametrize(("encoded", "words"), [([1, 2], "splits 'The ship"), (None, "does not read the tokenizer")])
def test_other_tokens_are_noticed(
    encoded: list[int] | None, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Tokenizer:
        def __init__(self, model: object) -> None:
            if encoded is None:
                raise RuntimeError("unknown class")

        def update_options(self, **options: object) -> None:
            pass

        def encode(self, text: str) -> list[int] | None:
            return encoded

    fake = SimpleNamespace(Tokenizer=Tokenizer, Model=str)
    monkeypatch.setattr(genai_folder, "genai_package", lambda: fake)
    warn_of_tokens(Path("onnx"), lambda text: {"input_ids": [0, 1, 2]})
    assert words in caplog.text


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        pytest.param("llama", {}, marks=pytest.mark.slow),
        pytest.param("llama", {"is_tied": True, "symmetric": True, "group_size": 64}, marks=pytest.mark.slow),
        pytest.param("qwen2", {"bits": 2, "group_size": 16}, marks=pytest.mark.slow),
        pytest.param("qwen3", {"bits": 8}, marks=pytest.mark.slow),
    ],
    ids=["4", "4-symmetric-tied", "2-qwen2", "8-qwen3"],
)
def test_the_runtime_computes_our_logits(
    model_type: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime_genai")
    onnx = pytest.importorskip("onnx")
    importable_torchvision(tmp_path, monkeypatch)
    made = convert(packed_folder(tmp_path, model_type, **options), tmp_path / "onnx", "onnx-genai")
    assert made.check is not None and made.check.difference <= 1e-3 and made.check.reader == "onnxruntime-genai"
    nodes = onnx.load(made.output / "model.onnx", load_external_data=False).graph.node
    products = [node for node in nodes if node.op_type == "MatMulNBits"]
    assert len(products) >= 15 and sum(node.op_type == "GroupQueryAttention" for node in nodes) == 3
    for node in products:
        values = {attribute.name: attribute.i for attribute in node.attribute}
        assert values["bits"] == options.get("bits", 4) and values["accuracy_level"] == 1
    assert json.loads((made.output / "genai_config.json").read_text())["model"]["type"] == model_type
    assert not list(tmp_path.glob("*gptq*"))


def test_what_matmul_nbits_does_not_hold() -> None:
    columns = {"a": 64}
    assert why_not({"a": LayerFormat(4, 32, False)}, columns) is None
    assert why_not({"a": LayerFormat(2, 0, False)}, columns) is None
    assert "has 3 bits: MatMulNBits has kernels for 2, 4 and 8" in str(
        why_not({"a": LayerFormat(3, 32, False)}, columns)
    )
    assert "groups of 96" in str(why_not({"a": LayerFormat(4, 0, False)}, {"a": 96}))
    assert "fp8 weights" in str(why_not({"a": LayerFormat(8, 0, True, "fp8")}, columns))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_of_0_survive(bits: int) -> None:
    """The builder adds one modulo 2^bits."""
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (32, 96), generator=generator).to(torch.uint8)
    zeros = torch.randint(0, 1 << bits, (32, 3), generator=generator).to(torch.uint8)
    zeros[0, 0] = 0
    packed = PackedWeight.from_codes(codes, torch.ones(32, 3), zeros, bits)
    tensors = builder_tensors("a", packed)
    stored = unpack(tensors["a.qzeros"], bits, packed.out_features).t()
    assert torch.equal((stored.to(torch.int16) + 1 & (1 << bits) - 1).to(torch.uint8), zeros)
    assert tensors["a.scales"].dtype == torch.float32


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = packed_folder(tmp_path, bits=3)
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*onnxruntime-genai"):
        convert(source, tmp_path / "onnx", "onnx-genai")
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", sys)
    with pytest.raises(DeploymentError, match="has 3 bits"):
        convert(source, tmp_path / "onnx", "onnx-genai")
    assert not (tmp_path / "onnx").exists()
