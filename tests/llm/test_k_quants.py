"""Q4_K and Q6_K: the package gguf reads our values bit for bit, and searched scales err less than rounded ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsebit.errors import ConfigError, DeploymentError
from sparsebit.llm.gguf.blocks import rounded_blocks, values_of
from sparsebit.llm.gguf.k_quant_math import Q4K, Q6K, fit_q4_k, fit_q6_k
from sparsebit.llm.gguf.tensors import MIXES, fitting, mix_of
from sparsebit.llm.layers.packed_weight import PackedWeight

gguf = pytest.importorskip("gguf")


def weights(rows: int = 6, columns: int = 512) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    scales = torch.rand(rows, columns // 32, 1, generator=generator) + 0.2
    groups = torch.randn(rows, columns // 32, 32, generator=generator) * scales * 0.02
    return groups.flatten(1)


def theirs(kind: str, data: Tensor) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind]))


def random_bytes(size: int) -> Tensor:
    """Three rows of two blocks of arbitrary bytes, with finite float16 numbers."""
    data = torch.randint(0, 256, (3, 2, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    places = (1, 3) if size == 144 else (209,)
    for place in places:
        data[..., place] &= 0b10111011
    return data.flatten(1)


@pytest.mark.parametrize(("kind", "size"), [("Q4_K", 144), ("Q6_K", 210)])
def test_any_bytes_are_read_as_they_are_by_gguf(kind: str, size: int) -> None:
    data = random_bytes(size)
    assert torch.equal(values_of(kind, data), theirs(kind, data))
    assert torch.equal((Q4K if kind == "Q4_K" else Q6K).from_bytes(data).to_bytes(), data)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_0", "Q8_0"])
def test_their_values_are_ours(kind: str) -> None:
    weight = weights()
    data = rounded_blocks(weight, kind)
    assert torch.equal(theirs(kind, data), values_of(kind, data))
    error = (values_of(kind, data) - weight).norm() / weight.norm()
    assert float(error) < {"Q4_K": 0.08, "Q6_K": 0.02, "Q5_0": 0.045, "Q8_0": 0.0055}[kind]


def importance(weight: Tensor) -> Tensor:
    blocks = weight.unflatten(1, (-1, 256))
    return (blocks.square().mean(-1, keepdim=True).sqrt() + blocks.abs()).flatten(1)


def nearest_q4_k(weight: Tensor) -> Tensor:
    """Ranges of the groups, rounded to six bits of the largest in a block."""
    groups = weight.unflatten(1, (-1, 8, 32))
    low = groups.amin(-1).clamp(max=0)
    scales, mins = (groups.amax(-1) - low) / 15, -low
    factors = [(numbers.amax(-1, keepdim=True) / 63).half().float() for numbers in (scales, mins)]
    s, m = ((numbers / factor).round() * factor for numbers, factor in zip((scales, mins), factors, strict=True))
    codes = ((groups + m[..., None]) / s[..., None]).round().clamp(0, 15)
    return (codes * s[..., None] - m[..., None]).flatten(1)


def test_the_search_errs_less_than_rounded_ranges() -> None:
    weight = weights(32)
    found, usual = fit_q4_k(weight).values(), nearest_q4_k(weight)
    assert float((importance(weight) * (found - weight) ** 2).sum()) < 0.87 * float(
        (importance(weight) * (usual - weight) ** 2).sum()
    )
    assert float((found - weight).norm()) < 0.94 * float((usual - weight).norm())


@pytest.mark.parametrize("symmetric", [False, True], ids=["zero-points", "symmetric"])
@pytest.mark.parametrize("group_size", [32, 128])
def test_codes_of_a_packed_weight_are_kept(symmetric: bool, group_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (8, 512), generator=generator).to(torch.uint8)
    scales = 0.002 + 0.004 * torch.rand(8, 512 // group_size, generator=generator)
    zeros = None if symmetric else torch.randint(4, 12, scales.shape, generator=generator)
    packed = PackedWeight.from_codes(codes, scales.half(), zeros, 4)
    found = Q4K.from_bytes(rounded_blocks(packed, "Q4_K"))
    assert float((found.codes.flatten(1) == codes).float().mean()) > 0.99
    expected = packed.dequantize(torch.float32)
    # Scales and mins of six bits are 0.4 % of the largest off in the mean.
    assert float((found.values() - expected).norm() / expected.norm()) < 0.02
    better = Q6K.from_bytes(rounded_blocks(packed, "Q6_K"))
    assert float((better.values() - expected).norm() / expected.norm()) < 0.003


def test_one_scale_in_a_block_is_exact() -> None:
    """A scale that is a float16 number times 63 is held exactly, and so is the whole weight."""
    codes = torch.randint(0, 16, (4, 512), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    scales = torch.full((4, 1), 2.0**-10)
    packed = PackedWeight.from_codes(codes, scales, torch.full((4, 1), 7), 4)
    for kind in ("Q4_K", "Q6_K"):
        assert torch.equal(values_of(kind, rounded_blocks(packed, kind)), packed.dequantize(torch.float32))


@pytest.mark.parametrize("fit", [fit_q4_k, fit_q6_k])
def test_extreme_weights(fit: object) -> None:
    rows = [
        torch.zeros(256),
        torch.full((256,), 0.5),
        torch.full((256,), -0.5),
        torch.linspace(1e-3, 1, 256),
        -torch.linspace(1e-3, 1, 256),
        torch.randn(256, generator=torch.Generator().manual_seed(0)) * 1e-6,
        torch.randn(256, generator=torch.Generator().manual_seed(0)) * 1e4,
    ]
    weight = torch.stack(rows)
    weight[3, 40:] = 0
    assert callable(fit)
    found = fit(weight).values()
    assert bool(found.isfinite().all()) and torch.equal(found[0], weight[0])
    error = (found - weight).norm(dim=1) / weight.norm(dim=1).clamp(min=1e-30)
    assert float(error[[1, 2]].max()) < 1e-3 and float(error[[3, 4, 6]].max()) < 0.09


def test_weights_that_are_not_finite_are_refused() -> None:
    weight = weights()
    weight[0, 0] = torch.inf
    with pytest.raises(DeploymentError, match="not finite"):
        rounded_blocks(weight, "Q4_K")


def test_the_mix_is_that_of_llama_cpp() -> None:
    mix = MIXES["Q4_K_M"]
    kinds = [mix.type_of(f"blk.{number}.attn_v.weight", 32, is_tied=False) for number in range(32)]
    assert [number for number, kind in enumerate(kinds) if kind == "Q6_K"] == [
        *range(4),
        *(6, 9, 12, 15, 18, 21, 24, 27),
        *range(28, 32),
    ]
    assert mix.type_of("blk.0.ffn_down.weight", 32, is_tied=False) == "Q6_K"
    assert mix.type_of("blk.0.attn_q.weight", 32, is_tied=False) == "Q4_K"
    assert mix.type_of("token_embd.weight", 32, is_tied=False) == "Q4_K"
    assert mix.type_of("token_embd.weight", 32, is_tied=True) == "Q6_K"
    assert mix.type_of("output.weight", 32, is_tied=False) == "Q6_K"
    assert MIXES["Q4_K"].type_of("output.weight", 32, is_tied=False) is None
    assert [fitting("Q4_K", 512), fitting("Q4_K", 1408), fitting("Q6_K", 1408)] == ["Q4_K", "Q5_0", "Q8_0"]
    with pytest.raises(ConfigError, match="gguf_type='Q5_K': allowed: exact, Q4_K, Q6_K, Q4_K_M"):
        mix_of("Q5_K")
