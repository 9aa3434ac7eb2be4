"""Checkpoints of the first Sparsebit: the same values in today's formats."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.llm import convert, load
from tests.llm.tiny_models import saved, tiny_model

TOKENS = torch.arange(3, 35)[None]
OLD_NAMES = (
    ("model.layers", "model.decoder.layers"), ("model.embed_tokens", "model.decoder.embed_tokens"),
    ("model.norm", "model.decoder.norm"), ("mlp.gate_proj", "feed_forward.w1"), ("mlp.down_proj", "feed_forward.w2"),
    ("mlp.up_proj", "feed_forward.w3"), ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"),
)  # fmt: skip


def old_words(codes: Tensor, bits: int) -> Tensor:
    """`codes (in, out)` as the first Sparsebit packs them: one long row of bits for each column."""
    count = codes.shape[0] * bits // 32
    columns = []
    for column in codes.t().tolist():
        number = sum(code << bits * place for place, code in enumerate(column))
        columns.append([number >> 32 * word & 0xFFFFFFFF for word in range(count)])
    words = torch.tensor(columns).t()
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def old_checkpoint(
    model: Any, path: Path, bits_of: dict[str, int], group_size: int = 0, *, pack8: bool = False, old_names: bool = True
) -> dict[str, Tensor]:
    """Writes the file, puts its values into `model` and gives the tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    layers_bit: dict[str, int] = {}
    for name, stored in model.state_dict().items():
        layer, value = name.removesuffix(".weight"), stored.half()
        model.get_submodule(layer).weight.data = value.float()
        found = {name: value}
        if layer.endswith("_proj"):
            bits = bits_of.get(layer.rsplit(".", 1)[-1], 4)
            rows, columns = value.shape
            groups = columns // group_size if group_size else 1
            codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
            scales = 0.05 * torch.rand(rows, groups, 1, generator=generator) + 0.02
            products = torch.randint(0, 1 << bits, (rows, groups, 1), generator=generator) * scales
            values = (codes.view(rows, groups, -1) * scales - products).flatten(1)
            model.get_submodule(layer).weight.data = values
            words = old_words(codes.t(), bits)
            if pack8:  # byte j of word i is row 4 i + j
                words = words[:, None].contiguous().view(torch.int8).unflatten(-1, (-1, 4)).transpose(-1, -2)
                words = words.flatten(0, 2).contiguous()
            shape = (rows, groups, 1) if groups > 1 else (rows, 1)
            found = {
                f"{layer}.qweight": words,
                f"{layer}.scales": scales.view(shape),
                f"{layer}.zeros": products.view(shape),
                f"{layer}.bias": torch.zeros(rows),
            }
            layers_bit[layer] = bits
        tensors |= found
    for old, new in OLD_NAMES if old_names else ():
        tensors = {name.replace(old, new): value for name, value in tensors.items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    arguments = argparse.Namespace(groupsize=group_size or -1)
    torch.save({"model": tensors, "hyper_parameters": arguments, "layers_bit": layers_bit}, path)
    return tensors


@pytest.mark.parametrize(
    "options",
    [
        {"bits_of": {"gate_proj": 3, "up_proj": 3, "o_proj": 2}},
        {"bits_of": {"down_proj": 3}, "group_size": 32},
        {"bits_of": {}, "pack8": True, "old_names": False},
    ],
    ids=["pack32-mixed", "pack32-groups", "pack8"],
)
def test_the_values_are_those_of_the_checkpoint(options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model()
    base = saved(model, tmp_path / "base")
    file = tmp_path / "llama.pth.tar"
    old_checkpoint(model, file, **options)
    made = convert(file, tmp_path / "out", "compressed-tensors", base=base)
    assert made.check is not None and made.check.difference <= 1e-3 and made.check.reader == "transformers"
    with torch.no_grad():
        found, expected = load(made.output)(TOKENS).logits, model(TOKENS).logits
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
    bits = {layer.bits for layer in made.formats.values()}
    assert bits == {4, *options["bits_of"].values()} and len(made.formats) == 21
    again = convert(file, tmp_path / "gptq", "gptq", base=base, check=False)
    with torch.no_grad():
        logits = load(again.output)(TOKENS).logits
    assert float((logits - expected).abs().max() / expected.abs().max()) < 5e-3  # float16 scales


def test_what_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    base = saved(model, tmp_path / "base")
    file = tmp_path / "llama.pth.tar"
    tensors = old_checkpoint(model, file, {})
    with pytest.raises(ConfigError, match="needs base"):
        convert(file, tmp_path / "out", "compressed-tensors")
    with pytest.raises(ConfigError, match="it is for checkpoint files"):
        convert(base, tmp_path / "out", "compressed-tensors", base=base)
    layer = "model.decoder.layers.1.feed_forward.w1"
    for changed, message in (
        ({f"{layer}.bias": torch.ones(128)}, "has a bias"),
        ({f"{layer}.zeros": tensors[f"{layer}.scales"] * 1.4}, "not whole numbers"),
        ({f"{layer}.qweight": tensors[f"{layer}.qweight"][:5]}, "not those of 64 inputs"),
        ({"model.decoder.norm.weight": torch.ones(3)}, "no tensor model.norm.weight"),
    ):
        torch.save({"model": {**tensors, **changed}}, file)
        with pytest.raises(CheckpointError, match=message):
            convert(file, tmp_path / "out", "compressed-tensors", base=base)
    torch.save({"model": {"a": torch.ones(1)}}, file)
    with pytest.raises(CheckpointError, match="not a checkpoint of the first Sparsebit"):
        convert(file, tmp_path / "out", "compressed-tensors", base=base)
    torch.save({"model": tensors, "code": Path}, file)
    with pytest.raises(CheckpointError, match="without running code"):
        convert(file, tmp_path / "out", "compressed-tensors", base=base)
    assert not (tmp_path / "out").exists()
