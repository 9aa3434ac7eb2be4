"""Layouts of kernels: codes there and back, the product, and layers that no kernel takes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from sparsebit.errors import ConfigError
from sparsebit.llm import probe_cpu
from sparsebit.llm.layers import cpu_probe
from sparsebit.llm.layers.cpu_probe import CpuProbe
from sparsebit.llm.layers.kernel_layouts import DYNAMIC, FRAGMENTS, INT4PACK, LAYOUTS, KernelLayout
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.llm.layers.quant_linear import QuantLinear, kernel_paths, resident_bytes

ON_CPU = [INT4PACK, DYNAMIC]
FAR = {"int4pack": 6e-3, "dyn_quant_4bit": 2e-2}


def weight(bits: int = 4, symmetric: bool = False, group: int = 64, rows: int = 48) -> PackedWeight:
    codes = torch.randint(0, 1 << bits, (rows, 256))
    scales = torch.rand(rows, 256 // group).add_(0.1).half()
    return PackedWeight.from_codes(
        codes, scales, None if symmetric else torch.randint(0, 1 << bits, scales.shape), bits
    )


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> object:
    """The probe finds this layout the fastest."""

    def use(layout: KernelLayout) -> None:
        monkeypatch.setattr(cpu_probe, "_probe", lambda *_: CpuProbe(layout, {}, {}))

    return use


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group", [32, 128])
def test_codes_come_back(layout: KernelLayout, symmetric: bool, group: int) -> None:
    packed = weight(symmetric=symmetric, group=group)
    assert torch.equal(layout.codes(layout.prepare(packed, torch.bfloat16)), packed.codes())


@pytest.mark.parametrize("layout", ON_CPU, ids=FAR)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_the_product(layout: KernelLayout, symmetric: bool, num_rows: int) -> None:
    packed, x = weight(symmetric=symmetric), torch.randn(num_rows, 256)
    found = layout.product(x, layout.prepare(packed, x.dtype))
    assert found.dtype == x.dtype
    assert difference(found, x @ packed.dequantize(torch.float32).t()) < FAR[layout.name]


@pytest.mark.parametrize("layout", ON_CPU, ids=FAR)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_the_product_of_inputs_that_are_not_contiguous(layout: KernelLayout, symmetric: bool) -> None:
    packed = weight(symmetric=symmetric)
    ready, dense = layout.prepare(packed, torch.float32), packed.dequantize(torch.float32)
    for x in (
        torch.randn(256, 5).t(),
        torch.randn(5, 512)[:, ::2],
        torch.randn(9, 256)[::2],
        torch.randn(256).expand(3, -1),
    ):
        for given in (x, x.bfloat16()):
            assert difference(layout.product(given, ready), given.float() @ dense.t()) < FAR[layout.name]


def test_the_product_of_fragments_where_there_is_no_gpu() -> None:
    packed, x = weight(), torch.randn(3, 256).bfloat16()
    found = FRAGMENTS.product(x, FRAGMENTS.prepare(packed, torch.bfloat16))
    assert difference(found, x.double() @ packed.dequantize(torch.float64).t()) < 5e-3


@pytest.mark.parametrize("layout", ON_CPU, ids=FAR)
def test_a_prepared_layer(layout: KernelLayout, take: object) -> None:
    take(layout)  # type: ignore[operator]
    packed, x, bias = weight(), torch.randn(2, 3, 256), torch.randn(48)
    layer = QuantLinear(packed, bias)
    expected, kept = layer(x), copy.deepcopy(layer.state_dict())
    layer.prepare(torch.float32, "int8")
    assert layer.path == layout.name and layout.name in repr(layer)
    assert layer(x).shape == expected.shape and difference(layer(x), expected) < FAR[layout.name]
    if layout is INT4PACK:
        assert resident_bytes(layer) < 1.5 * resident_bytes(QuantLinear(packed, bias))
    assert all(torch.equal(value, kept[name]) for name, value in layer.state_dict().items())
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    layer.load_state_dict(QuantLinear(weight(), bias).state_dict())
    assert layer.path == layout.name and difference(layer(x), expected) > 0.1
    assert layer.to(torch.float64).scales.dtype == torch.float64
    assert layer.path == layout.name


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
def test_another_type_of_inputs_than_that_of_the_scales(stored: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was prepared for one type stayed, where the scales had the new one already."""
    monkeypatch.setattr(QuantLinear, "_choice", lambda *_: (FRAGMENTS, ""))
    other = torch.bfloat16 if stored == torch.float16 else torch.float16
    packed, x = weight(), torch.randn(3, 256)
    layer = QuantLinear(replace(packed, scales=packed.scales.to(stored)))
    expected = layer(x)
    layer.prepare(other)
    assert difference(layer(x.to(other)), expected) < 0.02
    assert difference(layer.to(stored)(x.to(stored)), expected) < 0.02


def test_gradients_take_the_exact_way(take: object) -> None:
    take(INT4PACK)  # type: ignore[operator]
    layer, x = QuantLinear(weight()), torch.randn(2, 256, requires_grad=True)
    exact = layer(x)
    layer.prepare(torch.float32, "bfloat16")
    found = layer(x)
    assert torch.equal(found, exact)
    found.sum().backward()
    assert x.grad is not None and difference(x.grad[0], weight_sums(layer)) < 1e-4


def weight_sums(layer: QuantLinear) -> torch.Tensor:
    return layer.packed.dequantize(torch.float32).sum(0)


@pytest.mark.parametrize(
    ("packed", "reason"),
    [(weight(3), "3 bits: the kernel has 4"), (weight(group=16), "groups of 16"), (weight(rows=41), "41 outputs")],
    ids=["bits", "group", "outputs"],
)
def test_layers_that_no_kernel_takes(packed: PackedWeight, reason: str, take: object) -> None:
    take(INT4PACK)  # type: ignore[operator]
    layer, x = QuantLinear(packed), torch.randn(1, 256)
    expected = layer(x)
    layer.prepare(torch.float32, "bfloat16")
    assert layer.path == "unpacked" and reason in layer.path_reason
    assert torch.equal(layer(x), expected)
    assert [reason in path for path in kernel_paths(torch.nn.ModuleList([layer, layer]))] == [True]


def test_float32_activations_are_never_rounded() -> None:
    layer = QuantLinear(weight())
    layer.prepare()
    assert layer.path == "unpacked" and "float32" in layer.path_reason


@pytest.mark.parametrize("activations", ["bfloat16", "int8"])
def test_the_probe_takes_the_fastest(activations: str) -> None:
    cpu_probe._probe.cache_clear()
    found = probe_cpu(activations)
    allowed = {name: seconds for name, seconds in found.seconds.items() if name not in found.refused}
    assert found.seconds[found.name] == min(allowed.values())
    assert ("dyn_quant_4bit" in {*found.seconds, *found.refused}) == (activations == "int8")
    assert found.difference["unpacked"] < 1e-5 and probe_cpu(activations) is found


def test_the_probe_refuses_a_kernel_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = KernelLayout(
        "int4pack",
        "bfloat16",
        INT4PACK.refusal,
        INT4PACK.prepare,
        lambda x, w: 2 * INT4PACK.product(x, w),
        INT4PACK.codes,
    )
    monkeypatch.setattr(cpu_probe, "INT4PACK", wrong)
    cpu_probe._probe.cache_clear()
    found = probe_cpu("bfloat16")
    cpu_probe._probe.cache_clear()
    assert found.name == "unpacked" and "off" in found.refused["int4pack"]


def test_unknown_activations() -> None:
    with pytest.raises(ConfigError, match="activations='fp8': allowed: float32, bfloat16, int8"):
        probe_cpu("fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("num_rows", [1, 16, 70, 700])
def test_a_layer_on_a_gpu(dtype: torch.dtype, symmetric: bool, num_rows: int) -> None:
    packed, bias = weight(symmetric=symmetric, rows=200), torch.randn(200)
    layer = QuantLinear(packed, bias).to("cuda")
    layer.prepare(dtype)
    if layer.path != "cuda_fragments":
        pytest.skip(layer.path_reason)
    x = torch.randn(num_rows, 256, device="cuda", dtype=dtype)
    dense = torch.nn.functional.linear(x.double(), packed.dequantize(torch.float64).cuda(), bias.double().cuda())
    assert difference(layer(x), dense) < (6e-3 if dtype == torch.bfloat16 else 1e-3)
    assert torch.equal(layer.packed.codes().cpu(), packed.codes())
    assert layer.to("cpu").path == "unpacked" and torch.equal(layer.packed.codes(), packed.codes())


@pytest.mark.gpu
def test_float32_on_a_gpu_is_unpacked() -> None:
    layer = QuantLinear(weight()).to("cuda")
    layer.prepare(torch.float32)
    assert layer.path == "unpacked" and layer(torch.randn(1, 256, device="cuda")).shape == (1, 48)
