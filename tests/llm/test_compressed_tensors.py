"""The pack-quantized format: our tensors are those of compressed-tensors, and read back as they were."""

from __future__ import annotations

import pytest
import torch

from sparsebit.errors import CheckpointError, DeploymentError
from sparsebit.llm.checkpoint.compressed_tensors import layer_tensors, make_config, read_config, read_layer
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.converting.load_check import need_reader
from sparsebit.llm.converting.targets import GPTQ, vllm_reasons
from tests.llm.layers.test_packed_weight import packed_weight

NAMES = ["model.layers.0.q", "model.layers.0.k", "lm_head"]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_there_and_back(bits: int, symmetric: bool) -> None:
    packed = packed_weight(bits, symmetric, rows=40)
    tensors = layer_tensors("fc", packed)
    again = read_layer(tensors, "fc", LayerFormat(bits, 32, symmetric))
    assert torch.equal(again.dequantize(torch.float32), packed.dequantize(torch.float32))
    if symmetric:
        assert "fc.weight_zero_point" not in tensors


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_their_reader_gives_our_values(symmetric: bool) -> None:
    base = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    packed = packed_weight(3, symmetric, rows=40)
    tensors = {key.removeprefix("fc."): value for key, value in layer_tensors("fc", packed).items()}
    weights = quantization.QuantizationArgs(num_bits=3, symmetric=symmetric, strategy="group", group_size=32)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    found = base.PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]
    assert torch.equal(found.float(), packed.dequantize(torch.float16).float())


def test_one_format_is_said_for_the_class() -> None:
    layer = LayerFormat(4, 128, True)
    config = make_config(dict.fromkeys(NAMES[:2], layer), ["lm_head"])
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert read_config(config, NAMES) == dict.fromkeys(NAMES[:2], layer)


def test_several_formats_are_said_by_name() -> None:
    formats = {NAMES[0]: LayerFormat(4, 64, False), NAMES[1]: LayerFormat(2, 0, True)}
    config = make_config(formats, ["lm_head"])
    assert [group["weights"]["num_bits"] for group in config["config_groups"].values()] == [4, 2]
    assert read_config(config, NAMES) == formats


def test_what_is_refused() -> None:
    config = make_config({"a": LayerFormat(4, 128, True)}, [])
    with pytest.raises(CheckpointError, match="'gptq'"):
        read_config({**config, "quant_method": "gptq"}, ["a"])
    config["config_groups"]["group_0"]["weights"]["type"] = "float"
    with pytest.raises(CheckpointError, match="layer a: float weights"):
        read_config(config, ["a"])
    tensors = layer_tensors("fc", packed_weight(symmetric=True))
    with pytest.raises(CheckpointError, match="no weight_zero_point"):
        read_layer(tensors, "fc", LayerFormat(4, 32, False))


def test_rules_of_vllm() -> None:
    good, other = LayerFormat(4, 128, True), LayerFormat(8, 128, True)
    assert vllm_reasons({"q": good, "k": good}, [("q", "k")]) == ()
    assert "q, k are one matrix" in vllm_reasons({"q": good, "k": other}, [("q", "k")])[0]
    reasons = vllm_reasons({"q": LayerFormat(3, 48, True)}, [])
    assert "3 bits" in reasons[0] and "groups of 48" in reasons[1]
    affine = LayerFormat(4, 128, False)
    assert vllm_reasons({"q": affine}, []) == ()
    assert vllm_reasons({"q": affine}, [], GPTQ) == (
        "4 bits with zero points: of gptq files its own kernels have 4 bits, 8 bits",
    )


@pytest.mark.parametrize("symmetric", [True, False])
def test_files_with_gaps_between_codes(symmetric: bool) -> None:
    """compressed-tensors before 0.18 put ten codes of 3 bits into a word and left two bits."""
    layer = LayerFormat(3, 32, symmetric)
    packed = packed_weight(3, symmetric, rows=40)
    dense = layer_tensors("fc", packed)
    sparse = {**dense, "fc.weight_packed": with_gaps(packed.codes(), 3)}
    if packed.zeros is not None:
        sparse["fc.weight_zero_point"] = with_gaps(packed.zeros.mT, 3).mT.contiguous()
    assert sparse["fc.weight_packed"].shape != dense["fc.weight_packed"].shape
    found = read_layer(sparse, "fc", layer)
    assert torch.equal(found.dequantize(torch.float32), packed.dequantize(torch.float32))


def with_gaps(codes: torch.Tensor, bits: int) -> torch.Tensor:
    per_word = 32 // bits
    rows = torch.nn.functional.pad(codes.to(torch.int32), (0, -codes.shape[-1] % per_word)).unflatten(
        -1, (-1, per_word)
    )
    return (rows << bits * torch.arange(per_word, dtype=torch.int32)).sum(-1, dtype=torch.int32)


def test_three_bits_need_a_reader_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.17.1")
    need_reader({2, 4, 8})
    with pytest.raises(DeploymentError, match=r"compressed-tensors 0\.17\.1 .* 3 bits .*>=0\.18"):
        need_reader({3, 4})
