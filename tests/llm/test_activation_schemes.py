"""Folders of llm-compressor that round inputs to 8 bits: the logits are those of transformers, and of nothing less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebit.errors import CheckpointError, DeploymentError
from sparsebit.llm import FloatLinear, QuantLinear, convert, load, load_streamed
from sparsebit.llm.checkpoint.compressed_tensors import read_config
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.converting.load_check import relative_difference
from sparsebit.llm.layers.input_kinds import InputFormat
from sparsebit.llm.layers.input_rounding import InputRounding
from sparsebit.numerics.packing import pack
from tests.llm.test_foreign_folders import edit, edit_tensors
from tests.llm.tiny_models import loaded, saved, tiny_model
from tests.parameters import first_fast

pytest.importorskip("compressed_tensors")
TOKENS = torch.randint(3, 96, (1, 20), generator=torch.Generator().manual_seed(1))
PER_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
CONSTANT = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True, "dynamic": False}
ROWS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
WHOLE = {**ROWS, "strategy": "tensor"}
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "int8 per token": (ROWS, PER_TOKEN, "int-quantized"),
    "int8 constant with a zero point": (ROWS, {**CONSTANT, "symmetric": False}, "int-quantized"),
    "fp8 constant": ({**ROWS, "type": "float"}, {**CONSTANT, "type": "float"}, "float-quantized"),
    "int4 packed, int8 per token": ({**ROWS, "num_bits": 4}, PER_TOKEN, "pack-quantized"),
    "int8 constant": (ROWS, CONSTANT, "int-quantized"),
    "int8 per token with zero points": (ROWS, {**PER_TOKEN, "symmetric": False}, "int-quantized"),
    "int8 of one scale": (WHOLE, PER_TOKEN, "int-quantized"),
    "int4 in bytes": ({**ROWS, "num_bits": 4}, PER_TOKEN, "int-quantized"),
    "int4 in bytes, in groups": (
        {**ROWS, "num_bits": 4, "strategy": "group", "group_size": 32}, PER_TOKEN, "int-quantized",
    ),
    "fp8 of one scale, constant": ({**WHOLE, "type": "float"}, {**CONSTANT, "type": "float"}, "float-quantized"),
    "fp8 of one scale, per token": ({**WHOLE, "type": "float"}, {**PER_TOKEN, "type": "float"}, "float-quantized"),
    "int4 packed, fp8 per token": ({**ROWS, "num_bits": 4}, {**PER_TOKEN, "type": "float"}, "pack-quantized"),
}  # fmt: skip


def folder_of(path: Path, weights: dict[str, Any], inputs: dict[str, Any], form: str) -> Path:
    """A tiny Llama as llm-compressor writes it with this scheme."""
    folder = saved(tiny_model(num_hidden_layers=2), path)

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            layer, weight = name.removesuffix(".weight"), tensors[name].float()
            blocks = weight.unflatten(1, (-1, weights.get("group_size") or weight.shape[1]))
            largest = blocks.abs().amax() if weights["strategy"] == "tensor" else blocks.abs().amax(-1)
            if weights["type"] == "float":
                scale = largest / 448
                codes = (blocks / scale[..., None]).to(torch.float8_e4m3fn).flatten(1)
            else:
                top = (1 << weights["num_bits"] - 1) - 1
                scale = largest / top
                codes = (blocks / scale[..., None]).round().to(torch.int8).flatten(1)
            tensors[f"{layer}.weight_scale"] = scale.reshape(1) if scale.ndim == 0 else scale
            if form == "pack-quantized":
                del tensors[name]
                tensors[f"{layer}.weight_packed"] = pack(codes + 8, 4)
                tensors[f"{layer}.weight_shape"] = torch.tensor(weight.shape)
            else:
                tensors[name] = codes
            if not inputs["dynamic"]:
                tensors[f"{layer}.input_scale"] = torch.tensor([0.01 if inputs["type"] == "float" else 0.03])
            if not (inputs["dynamic"] or inputs["symmetric"]):
                tensors[f"{layer}.input_zero_point"] = torch.tensor([-7], dtype=torch.int8)

    edit_tensors(folder, change)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    quantization = {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": form}}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip
    edit(folder, lambda config: config.update(quantization_config=quantization))
    return folder


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(TOKENS, use_cache=False).logits
    return found


@pytest.mark.parametrize("scheme", first_fast(SCHEMES, 4))
def test_the_logits_are_those_of_transformers(tmp_path: Path, scheme: str) -> None:
    folder = folder_of(tmp_path / "model", *SCHEMES[scheme])
    ours, theirs = logits(load(folder)), logits(loaded(folder))
    assert relative_difference(ours, theirs) < 2e-3  # a number at the border of two codes may round to either side
    assert torch.equal(logits(load_streamed(folder)), ours)
    # So that the comparison has something to see: without the rounding, logits are further off.
    plain = load(folder)
    for module in plain.modules():
        if isinstance(module, QuantLinear | FloatLinear):
            module.inputs = None
    assert relative_difference(logits(plain), theirs) > 4e-3


def test_they_stay_as_they_are(tmp_path: Path) -> None:
    """Files of weights alone would compute something else."""
    folder = folder_of(tmp_path / "model", *SCHEMES["int8 per token"])
    for output, kind in (("made", "compressed-tensors"), ("made", "gptq"), ("made.gguf", "gguf")):
        with pytest.raises(DeploymentError, match=r"q_proj rounds its inputs \(InputFormat"):
            convert(folder, tmp_path / output, kind, check=False)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("input_scale", torch.tensor([0.0]), "one finite number above 0 is read"),
        ("input_scale", torch.ones(64), "one finite number above 0 is read"),
        ("input_zero_point", torch.tensor([3], dtype=torch.int8), "an input_zero_point, and its config says"),
        ("weight_zero_point", torch.ones(64, 1, dtype=torch.int8), "zero points, and its config says"),
        ("weight", torch.zeros(64, 64, dtype=torch.int16), "codes of torch.int16"),
        ("input_scale", None, "has no input_scale"),
    ],
)
def test_damaged_tensors(tmp_path: Path, name: str, value: Tensor | None, words: str) -> None:
    folder = folder_of(tmp_path / "model", *SCHEMES["int8 constant"])
    key = f"model.layers.1.self_attn.q_proj.{name}"
    edit_tensors(folder, lambda tensors: tensors.pop(key) if value is None else tensors.update({key: value}))
    with pytest.raises(CheckpointError, match=words):
        load(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"input_activations": {**PER_TOKEN, "num_bits": 4}},
        {"input_activations": {**PER_TOKEN, "strategy": "group", "group_size": 128}},
        {"input_activations": {**CONSTANT, "dynamic": True}},
        {"input_activations": {**CONSTANT, "type": "float", "symmetric": False}},
        {"output_activations": CONSTANT},
    ],
)
def test_schemes_that_are_refused(changes: dict[str, Any]) -> None:
    group = {"targets": ["Linear"], "weights": ROWS, "input_activations": PER_TOKEN, **changes}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}
    with pytest.raises(CheckpointError, match="int weights with activations of 8 bits"):
        read_config(config, ["a"])


def test_formats() -> None:
    group = {"targets": ["Linear"], "weights": ROWS, "input_activations": {**CONSTANT, "symmetric": False}}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}
    inputs = InputFormat("int8", dynamic=False, symmetric=False)
    assert read_config(config, ["a"]) == {"a": LayerFormat(8, 0, True, inputs=inputs, is_dense=True)}


def test_rounding_by_hand() -> None:
    constant = InputRounding(InputFormat("int8", dynamic=False, symmetric=False), scale=0.5, zero=-28)
    x = torch.tensor([[0.2, 0.3, 100.0, -100.0]])
    assert torch.equal(constant.rounded(x), torch.tensor([[0.0, 0.5, 77.5, -50.0]]))
    tokens = InputRounding(InputFormat("int8", dynamic=True)).rounded(torch.tensor([[0.0, 0.0], [127.5, 1.4]]))
    assert torch.equal(tokens, torch.tensor([[0.0, 0.0], [127.0, 1.0]]))
    assert InputRounding(InputFormat("fp8", dynamic=False)).rounded(torch.tensor([500.0])).item() == 448.0


def test_gradients_are_straight_through(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", *SCHEMES["int8 per token"])
    layer: Any = load(folder).model.layers[0].mlp.down_proj
    x = torch.randn(2, layer.in_features, requires_grad=True)
    layer(x).sum().backward()
    weight = layer.packed.dequantize(torch.float32)
    assert x.grad is not None and torch.allclose(x.grad, weight.sum(0).expand(2, -1), atol=1e-5)


def test_nothing_is_unused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(folder_of(tmp_path / "model", *SCHEMES["int8 constant with a zero point"]))
    assert "have no place" not in caplog.text
