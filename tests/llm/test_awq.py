"""AWQ files: the order of AutoAWQ's words, there and back, whole folders, and what is refused."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebit.errors import CheckpointError, DeploymentError
from sparsebit.llm import Recipe, convert, load, load_streamed, quantize
from sparsebit.llm.checkpoint.awq import layer_tensors, make_config, read_config, read_layer
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.layers.packed_weight import PackedWeight
from tests.llm.layers.test_packed_weight import packed_weight
from tests.llm.tiny_models import saved, tiny_model

TOKENS = torch.randint(3, 96, (1, 20), generator=torch.Generator().manual_seed(1))


def textbook(tensors: dict[str, Tensor]) -> Tensor:
    """The values `(in, out)` by the loops of AutoAWQ: output `order_map[i]` of eight is in the bits from `4 i` on."""
    order_map = [0, 2, 4, 6, 1, 3, 5, 7]

    def numbers(words: Tensor) -> Tensor:
        found = torch.zeros(words.shape[0], words.shape[1] * 8, dtype=torch.int64)
        for column in range(words.shape[1]):
            for place, output in enumerate(order_map):
                found[:, column * 8 + output] = (words[:, column].long() >> 4 * place) & 15
        return found

    scales, codes = tensors["fc.scales"].float(), numbers(tensors["fc.qweight"])
    size = codes.shape[0] // len(scales)
    zeros = numbers(tensors["fc.qzeros"])
    return (codes - zeros.repeat_interleave(size, 0)) * scales.repeat_interleave(size, 0)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_there_and_back(symmetric: bool) -> None:
    packed = packed_weight(4, symmetric, rows=24)
    tensors = layer_tensors("fc", packed)
    assert tensors["fc.qweight"].shape == (packed.in_features, 3) and tensors["fc.qweight"].dtype == torch.int32
    values = packed.dequantize(torch.float32)
    assert torch.equal(textbook(tensors).t(), values)
    for group_size in (packed.group_size, 0):  # 0 stands for -1 in the config, and the scales say the size
        again = read_layer(tensors, "fc", LayerFormat(4, group_size, False))
        assert torch.equal(again.dequantize(torch.float32), values) and again.group_size == packed.group_size


def test_without_zero_points() -> None:
    tensors = layer_tensors("fc", packed_weight(4, True, rows=16))
    assert read_layer(tensors, "fc", LayerFormat(4, 32, True)).symmetric
    del tensors["fc.qzeros"]
    assert read_layer(tensors, "fc", LayerFormat(4, 32, True)).symmetric
    with pytest.raises(CheckpointError, match="layer fc has no qzeros"):
        read_layer(tensors, "fc", LayerFormat(4, 32, False))
    other = layer_tensors("fc", packed_weight(4, False, rows=16))
    with pytest.raises(CheckpointError, match="zero points, and its config says that there are none"):
        read_layer(other, "fc", LayerFormat(4, 32, True))


def test_what_files_cannot_hold() -> None:
    with pytest.raises(DeploymentError, match="layer fc has 3 bits: AWQ files have 4"):
        layer_tensors("fc", packed_weight(3, rows=16))
    with pytest.raises(DeploymentError, match="12 outputs: AWQ files need a multiple of 8"):
        layer_tensors("fc", packed_weight(4, rows=12))
    codes = torch.zeros(8, 32, dtype=torch.uint8)
    with pytest.raises(DeploymentError, match="float16 cannot hold"):
        layer_tensors("fc", PackedWeight.from_codes(codes, torch.full((8, 1), 1e-9), None, 4))
    with pytest.raises(DeploymentError, match="one format of 4 bits for all"):
        make_config({"a": LayerFormat(4, 32, True), "b": LayerFormat(4, 64, True)}, [])


def test_damaged_layers() -> None:
    tensors = layer_tensors("fc", packed_weight(4, False, rows=16))
    with pytest.raises(CheckpointError, match="groups of 32, and its config says 64"):
        read_layer(tensors, "fc", LayerFormat(4, 64, False))
    with pytest.raises(CheckpointError, match="the version gemm has int32 words of 8 outputs"):
        read_layer({**tensors, "fc.qweight": tensors["fc.qweight"].t().contiguous()}, "fc", LayerFormat(4, 32, False))
    with pytest.raises(CheckpointError, match="no scales"):
        read_layer({"fc.qweight": tensors["fc.qweight"]}, "fc", LayerFormat(4, 32, False))


def test_configs() -> None:
    config = make_config({"a.b": LayerFormat(4, 0, False)}, ["lm_head"])
    assert config["group_size"] == -1 and config["modules_to_not_convert"] == ["lm_head"]
    assert read_config(config, ["a.b"]) == {"a.b": LayerFormat(4, 0, False)}
    older = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
    assert read_config(older, ["a"]) == {"a": LayerFormat(4, 64, False)}
    for wrong, words in (({"version": "gemv"}, "'gemv', 4 bits"), ({"bits": 8}, "'gemm', 8 bits")):
        with pytest.raises(CheckpointError, match=words):
            read_config({**config, **wrong}, ["a"])


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed")
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_folders(tmp_path: Path, symmetric: bool) -> None:
    """Read back with equal bits, whole and streamed; transformers reads them too, if gptqmodel is installed."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}  # for gptqmodel
    folder = saved(tiny_model(num_hidden_layers=1, **sizes), tmp_path / "model")
    recipe = Recipe("rtn", scale_search="none", group_size=64, symmetric=symmetric)
    source = quantize(folder, tmp_path / "packed", recipe, check=False).folder
    made = convert(source, tmp_path / "awq", "awq")
    assert made.check is not None and made.check.difference <= 1e-3 and not made.check.vllm
    assert made.check.reader.startswith("transformers" if find_spec("gptqmodel") else "sparsebit")
    assert json.loads((made.output / "config.json").read_text())["quantization_config"]["quant_method"] == "awq"
    with torch.no_grad():
        expected = load(source)(TOKENS).logits
        assert torch.equal(load(made.output)(TOKENS).logits, expected)
        assert torch.equal(load_streamed(made.output)(TOKENS).logits, expected)
    back = convert(made.output, tmp_path / "back", "compressed-tensors").output
    with torch.no_grad():
        assert torch.equal(load(back)(TOKENS).logits, expected)


def test_formats_that_awq_does_not_have(tmp_path: Path) -> None:
    folder = saved(tiny_model(num_hidden_layers=1), tmp_path / "model")
    recipe = Recipe("rtn", bits=3, scale_search="none", group_size=32)
    source = quantize(folder, tmp_path / "packed", recipe, check=False).folder
    with pytest.raises(DeploymentError, match="layers of 3 bits in groups of 32: AWQ files have one format of 4 bits"):
        convert(source, tmp_path / "awq", "awq")
    assert not (tmp_path / "awq").exists()
