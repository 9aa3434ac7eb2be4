"""`convert` to ONNX Runtime GenAI: the runtime computes the logits of the packed model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebit.errors import DeploymentError, MissingExtraError
from sparsebit.llm import Recipe, convert, quantize
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.genai_folder import builder_tensors, why_not
from sparsebit.llm.packed_weight import PackedWeight
from sparsebit.numerics.packing import unpack
from tests.llm.tiny_models import saved, tiny_model, with_bpe

# The builder runs in a process of its own, where torchvision has to be importable too.
SITE = "from tests import torchvision_shim\ntorchvision_shim.install()\n"


def packed_folder(tmp_path: Path, model_type: str = "llama", *, is_tied: bool = False, **options: Any) -> Path:
    model = tiny_model(model_type, vocab_size=264, bos_token_id=257, eos_token_id=258, tie_word_embeddings=is_tied)
    folder = with_bpe(saved(model, tmp_path / "model"))
    recipe = Recipe(method="rtn", scale_search="none", **{"group_size": 32, **options})
    return quantize(folder, tmp_path / "packed", recipe, check=False).folder


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {}),
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
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
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
    with pytest.raises(MissingExtraError, match=r"pip install 'sparsebit\[genai\]'"):
        convert(source, tmp_path / "onnx", "onnx-genai")
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", sys)
    with pytest.raises(DeploymentError, match="has 3 bits"):
        convert(source, tmp_path / "onnx", "onnx-genai")
    assert not (tmp_path / "onnx").exists()
