"""Float weights: what is stored is what is computed, transformers computes the same, and other uses are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebit.errors import CheckpointError, ConfigError, DeploymentError
from sparsebit.llm import Recipe, convert, kernel_paths, load, quantize, resident_bytes
from sparsebit.llm.checkpoint import compressed_tensors
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.layers.float_kinds import FLOAT_KINDS, FloatKind
from sparsebit.llm.layers.float_weight import FloatLinear, FloatWeight, round_to_floats
from sparsebit.llm.layers.input_kinds import SCHEMES
from sparsebit.llm.layers.input_rounding import InputRounding
from tests.llm.quantizing.test_quantize_folder import contents, logits
from tests.llm.tiny_models import loaded, saved, tiny_model

WEIGHT = torch.randn(24, 64, generator=torch.Generator().manual_seed(3)) * 0.05


def rounded(kind: FloatKind, *, search: bool = True, weight: torch.Tensor = WEIGHT) -> FloatWeight:
    return round_to_floats(weight, kind, search=search, stored=torch.float16)


@pytest.mark.parametrize("kind", FLOAT_KINDS)
class TestRounding:
    def test_the_error_is_that_of_the_format(self, kind: FloatKind) -> None:
        error = (rounded(kind).dequantize(torch.float32) - WEIGHT).square().mean() / WEIGHT.square().mean()
        assert float(error.sqrt()) < {"fp8": 0.03, "mxfp4": 0.13, "nvfp4": 0.1}[kind]

    def test_searched_scales_err_less(self, kind: FloatKind) -> None:
        errors = [
            float((rounded(kind, search=search).dequantize(torch.float32) - WEIGHT).square().mean())
            for search in (True, False)
        ]
        assert errors[0] <= errors[1] and (kind == "fp8" or errors[0] < errors[1])

    def test_values_are_exact_in_bfloat16_for_4_bits(self, kind: FloatKind) -> None:
        weight = rounded(kind)
        whole = weight.dequantize(torch.float32)
        if kind != "fp8":
            assert torch.equal(whole.bfloat16().float(), whole)

    @pytest.mark.parametrize("size", [0.0, 1e-30, 1e-6, 1e4])
    def test_weights_of_any_size(self, kind: FloatKind, size: float) -> None:
        weight = WEIGHT * size
        weight[0] = 0
        found = rounded(kind, weight=weight)
        values = found.dequantize(torch.float32)
        assert bool(values.isfinite().all()) and float((values - weight).abs().max()) <= float(weight.abs().max())

    def test_files_hold_it(self, kind: FloatKind) -> None:
        weight = rounded(kind)
        layer = LayerFormat(weight.bits, 0, True, kind)
        tensors = compressed_tensors.layer_tensors("a.b", weight)
        again = compressed_tensors.read_layer(tensors, "a.b", layer)
        ours = FloatWeight.from_tensors(weight.to_tensors("a.b"), "a.b")
        for other in (again, ours):
            assert torch.equal(other.dequantize(torch.float32), weight.dequantize(torch.float32))
        tensors.popitem()
        with pytest.raises(CheckpointError, match=r"layer a\.b has no"):
            compressed_tensors.read_layer(tensors, "a.b", layer)

    def test_the_config_says_it(self, kind: FloatKind) -> None:
        layers = {"a": LayerFormat(8 if kind == "fp8" else 4, {"fp8": 0, "mxfp4": 32, "nvfp4": 16}[kind], True, kind)}
        config = compressed_tensors.make_config(layers, ["head"])
        assert config["format"] == compressed_tensors.FORMATS[kind]
        assert compressed_tensors.read_config(config, ["a", "head"]) == layers

    def test_a_layer_of_it(self, kind: FloatKind) -> None:
        x, bias = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(4)), torch.ones(24)
        weight = rounded(kind)
        layer = FloatLinear(weight, bias)
        inputs = InputRounding(SCHEMES["fp8"])(x) if kind == "fp8" else x
        torch.testing.assert_close(layer(x), inputs @ weight.dequantize(torch.float32).T + bias)
        half = FloatLinear(weight).to(torch.bfloat16)  # the type of activations; the weight keeps its own
        assert half.scales.dtype == weight.scales.dtype and half(x.bfloat16()).dtype == torch.bfloat16


def test_other_float_schemes_are_refused() -> None:
    group = compressed_tensors._scheme(LayerFormat(8, 0, True, "fp8")) | {"input_activations": None}
    with pytest.raises(CheckpointError, match="layer a: float weights"):
        compressed_tensors._layer_format(group, "a")


def test_tokens_have_their_own_scales() -> None:
    x = torch.tensor([[[448.0, 1.0, 17.3], [0.0, 0.0, 0.0], [-4.48, 0.01, 0.173]]])
    found = InputRounding(SCHEMES["fp8"])(x)
    assert found[0, 0].tolist() == [448.0, 1.0, 18.0] and found[0, 1].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(found[0, 2], torch.tensor([-4.48, 0.01, 0.18]))


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        Recipe("mxfp4").columns_per_scale(48, "layer")
    assert Recipe("nvfp4").columns_per_scale(48, "layer") == 16
    with pytest.raises(ConfigError, match="bits, group_size with method='fp8'"):
        Recipe("fp8", bits=8, group_size=64)
    with pytest.raises(CheckpointError, match="do not belong together"):
        FloatWeight("mxfp4", torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 3, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("kind", "model_type"), [("fp8", "qwen2"), ("mxfp4", "llama"), ("nvfp4", "llama"), ("fp8", "mixtral")]
)
def test_end_to_end(kind: FloatKind, model_type: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    source = saved(tiny_model(model_type, num_hidden_layers=1), tmp_path / "model")
    made = quantize(source, tmp_path / "packed", Recipe(kind))
    assert made.check is not None and made.check.difference <= 1e-3
    packed = load(made.folder)
    assert sum(isinstance(part, FloatLinear) for part in packed.modules()) == len(made.formats)
    assert sum(kernel_paths(packed).values()) == len(made.formats)
    assert resident_bytes(packed) < resident_bytes(loaded(source))
    error = (logits(packed) - logits(loaded(source))).abs().max() / logits(packed).abs().max()
    assert 0 < float(error) < {"fp8": 0.2, "mxfp4": 0.6, "nvfp4": 0.6}[kind]
    if model_type == "llama":
        with pytest.raises(DeploymentError, match="whole numbers only"):
            convert(made.folder, tmp_path / "gptq", "gptq")
    if model_type == "qwen2":
        again = convert(made.folder, tmp_path / "again", "compressed-tensors")
        assert contents(again.output)["config.json"] == contents(made.folder)["config.json"]


def test_global_scales_of_experts_are_refused(tmp_path: Path) -> None:
    source = saved(tiny_model("mixtral", num_hidden_layers=1), tmp_path / "model")
    with pytest.raises(ConfigError, match="global scales of experts"):
        quantize(source, tmp_path / "packed", Recipe("nvfp4"))


def test_layers_that_servers_join_share_the_divisor(tmp_path: Path) -> None:
    """VLLM takes the largest divisor of q, k and v for all three."""
    pytest.importorskip("compressed_tensors")
    model = tiny_model(num_hidden_layers=1)
    model.model.layers[0].self_attn.k_proj.weight.data[3, 5] = 9.0
    made = quantize(saved(model, tmp_path / "model"), tmp_path / "packed", Recipe("nvfp4"))
    attention: Any = load(made.folder).get_submodule("model.layers.0.self_attn")
    divisors = [float(getattr(attention, f"{name}_proj").divisor) for name in "qkvo"]
    assert divisors[0] == divisors[1] == divisors[2] < divisors[3]
