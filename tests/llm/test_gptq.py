"""GPTQ files: there and back, what versions 1 and 2 store, and what is refused."""

from __future__ import annotations

import pytest
import torch

from sparsebit.errors import CheckpointError, DeploymentError
from sparsebit.llm.checkpoint.gptq import Version, layer_tensors, make_config, read_config, read_layer
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.layers.packed_weight import PackedWeight
from tests.llm.layers.test_packed_weight import packed_weight


def weight(bits: int, symmetric: bool = False) -> PackedWeight:
    packed = packed_weight(bits, symmetric, rows=64)
    if packed.zeros is not None:
        packed.zeros.clamp_(min=1)
    return packed


def textbook(tensors: dict[str, torch.Tensor], bits: int, version: int) -> torch.Tensor:
    """The values as the first GPTQ's own code computes them, bit by bit: `(in, out)`."""

    def numbers(words: torch.Tensor) -> torch.Tensor:
        """`(n, words)` to `(n, codes)`."""
        places = torch.arange(32)
        bits_of = (words.long()[..., None] >> places) & 1
        return (bits_of.flatten(1).unflatten(1, (-1, bits)) << torch.arange(bits)).sum(-1)

    codes = numbers(tensors["fc.qweight"].t().contiguous()).t()
    zeros = numbers(tensors["fc.qzeros"]) + (1 if version == 1 else 0)
    group = tensors["fc.g_idx"].long()
    return (codes - zeros[group]) * tensors["fc.scales"].float()[group]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("version", [1, 2])
def test_there_and_back(bits: int, symmetric: bool, version: Version) -> None:
    packed = weight(bits, symmetric)
    tensors = layer_tensors("fc", packed, version)
    values = packed.dequantize(torch.float32)
    assert torch.equal(textbook(tensors, bits, version).t(), values)
    again = read_layer(tensors, "fc", LayerFormat(bits, 32, symmetric), version)
    assert torch.equal(again.dequantize(torch.float32), values) and again.symmetric == symmetric


def test_version_1_has_no_zero_point_0() -> None:
    packed = weight(4)
    assert packed.zeros is not None
    packed.zeros[0, 0] = 0
    with pytest.raises(DeploymentError, match="layer fc has zero points of 0, which version 1 cannot store"):
        layer_tensors("fc", packed, 1)
    tensors = layer_tensors("fc", packed, 2)
    assert torch.equal(read_layer(tensors, "fc", LayerFormat(4, 32, False), 2).codes(), packed.codes())
    tensors["fc.qzeros"][:] = -1  # 15 less one borrowed from the neighbour
    with pytest.raises(CheckpointError, match="version 1 cannot store"):
        read_layer(tensors, "fc", LayerFormat(4, 32, False), 1)


def test_what_files_cannot_hold() -> None:
    with pytest.raises(DeploymentError, match="the shape 24 x 96"):
        layer_tensors("fc", packed_weight(rows=24), 2)
    codes = torch.zeros(32, 32, dtype=torch.uint8)
    with pytest.raises(DeploymentError, match="float16 cannot hold"):
        layer_tensors("fc", PackedWeight.from_codes(codes, torch.full((32, 1), 1e-9), None, 4), 2)


def test_groups_by_activation_are_refused() -> None:
    tensors = layer_tensors("fc", weight(4), 2)
    tensors["fc.g_idx"] = tensors["fc.g_idx"].flip(0)
    with pytest.raises(CheckpointError, match="desc_act"):
        read_layer(tensors, "fc", LayerFormat(4, 32, False), 2)
    del tensors["fc.scales"]
    with pytest.raises(CheckpointError, match="no scales"):
        read_layer(tensors, "fc", LayerFormat(4, 32, False), 2)


def test_configs() -> None:
    formats = {"a.b": LayerFormat(4, 64, True), "a.c": LayerFormat(4, 64, True), "a.d": LayerFormat(2, 0, False)}
    config = make_config(formats, 2)
    assert (config["bits"], config["group_size"], config["checkpoint_format"]) == (4, 64, "gptq_v2")
    assert read_config(config, list(formats)) == (formats, 2)
    one = make_config({"a.b": formats["a.b"]}, 1)
    assert "dynamic" not in one and read_config(one, ["a.b"]) == ({"a.b": formats["a.b"]}, 1)
    with pytest.raises(CheckpointError, match="'marlin'"):
        read_config({**one, "checkpoint_format": "marlin"}, ["a.b"])


def test_the_newer_key_of_the_version() -> None:
    """Files that say `format` alone were read as version 1: every zero point was one too high."""
    config = make_config({"a.b": LayerFormat(4, 64, False)}, 2)
    del config["checkpoint_format"]
    assert read_config({**config, "format": "GPTQ_V2"}, ["a.b"])[1] == 2
    assert read_config({**config, "format": "gptq_v2", "checkpoint_format": "gptq"}, ["a.b"])[1] == 1
    assert read_config(config, ["a.b"])[1] == 1
    with pytest.raises(CheckpointError, match="pack_dtype 'int8'"):
        read_config({**config, "pack_dtype": "int8"}, ["a.b"])
