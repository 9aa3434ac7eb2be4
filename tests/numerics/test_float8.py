from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import SpecError
from sparsebit.numerics import float8, reference
from sparsebit.numerics.fake_quant.dispatch import fake_quantize
from sparsebit.numerics.qparams import qparams_from_range
from sparsebit.numerics.spec import PerChannel, PerGroup, PerTensor, TensorSpec

OPERATOR = torch.ops.sparsebit.fake_float8.default
FLOAT8 = TensorSpec(8, True, format="float8")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def numbers() -> Tensor:
    """Every finite number of the format, in order, zero once."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return codes[codes.isfinite()].unique()


@pytest.mark.parametrize("device", DEVICES)
class TestRounding:
    def test_numbers_stay_what_they_are(self, device: str) -> None:
        x = numbers().to(device)
        assert x.numel() == FLOAT8.num_levels == 253
        assert torch.equal(float8.fake_quantize(x, torch.ones((), device=device), None), x)

    def test_nearest_of_all_numbers(self, device: str) -> None:
        x = torch.randn(4000, device=device) * torch.logspace(-4, 3, 4000, device=device)
        grid = numbers().to(device)
        best = (x[:, None] - grid).abs().amin(1)
        y = float8.fake_quantize(x, torch.ones((), device=device), None)
        assert torch.equal((x - y).abs(), best)
        assert bool(torch.isin(y, grid).all())

    def test_ties_go_to_even(self, device: str) -> None:
        x = torch.tensor([17.0, 19.0, 2**-10, 3 * 2**-10, 464.0, -17.0], device=device)
        expected = torch.tensor([16.0, 20.0, 0.0, 2**-8, 448.0, -16.0], device=device)
        assert torch.equal(float8.fake_quantize(x, torch.ones((), device=device), None), expected)

    def test_inside_the_range_it_is_torchs_cast(self, device: str) -> None:
        x = torch.empty(5000, device=device).uniform_(-448, 448)
        assert torch.equal(
            float8.fake_quantize(x, torch.ones((), device=device), None), x.to(torch.float8_e4m3fn).float()
        )

    def test_beyond_the_range_it_saturates(self, device: str) -> None:
        x = torch.tensor([449.0, 500.0, 1e30, math.inf, -481.0, -math.inf], device=device)
        y = float8.fake_quantize(x, torch.ones((), device=device), None)
        assert y.tolist() == [448.0] * 4 + [-448.0] * 2

    def test_nan_stays(self, device: str) -> None:
        y = float8.fake_quantize(torch.tensor([math.nan, 1.0], device=device), torch.ones((), device=device), None)
        assert y.isnan().tolist() == [True, False]

    def test_subnormal_numbers(self, device: str) -> None:
        smallest = 2.0**-9
        x = torch.tensor([0.4, 0.6, 1.4, 6.6, -1.6], device=device) * smallest
        y = float8.fake_quantize(x, torch.ones((), device=device), None)
        assert (y / smallest).tolist() == [0.0, 1.0, 1.0, 7.0, -2.0]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerChannel(-1)], ids=str)
    def test_equals_the_reference(self, dtype: torch.dtype, granularity: PerTensor | PerChannel, device: str) -> None:
        x = torch.randn(6, 5, 3, 4, dtype=dtype, device=device).to(memory_format=torch.channels_last)
        axes = () if granularity.axis is None else tuple(d for d in range(4) if d != granularity.axis % 4)
        spec = FLOAT8.replace(granularity=granularity)
        scale, zero_point = qparams_from_range(-x.abs().amax(axes), x.abs().amax(axes), spec)
        y = fake_quantize(x, scale, zero_point, spec)
        assert y.dtype == dtype and y.stride() == x.stride()
        assert torch.equal(y, reference.fake_quantize(x, scale, zero_point, spec))
        codes = reference.quantize(x, scale, zero_point, spec)
        assert codes.dtype == torch.float8_e4m3fn
        assert torch.equal(reference.dequantize(codes, scale, zero_point, spec, dtype), y)
        assert torch.equal(float8.codes_of(x.float(), scale, granularity.axis), codes.float())

    def test_error_is_relative_to_each_value(self, device: str) -> None:
        x = torch.logspace(-3, 2, 3000, device=device)
        scale, zero_point = qparams_from_range(x.min(), x.max(), FLOAT8)
        error = (fake_quantize(x, scale, zero_point, FLOAT8) - x).abs()
        normal = x / scale >= 2.0**-6
        assert bool((error[normal] <= x[normal] * (1 + 1e-6) / 17).all())

    def test_straight_through_inside_and_nothing_beyond(self, device: str) -> None:
        x = torch.tensor([0.3, 447.0, 448.0, 450.0, 470.0, -1e9], device=device, requires_grad=True)
        float8.fake_quantize(x, torch.ones((), device=device), None).backward(torch.arange(1.0, 7.0, device=device))
        assert x.grad is not None and x.grad.tolist() == [1.0, 2.0, 3.0, 4.0, 0.0, 0.0]

    def test_the_largest_weight_keeps_its_gradient(self, device: str) -> None:
        x = torch.randn(200, 30, device=device, requires_grad=True)
        spec = FLOAT8.replace(granularity=PerChannel(0))
        fake_quantize(x, *qparams_from_range(*(x.detach().aminmax(dim=1)), spec), spec).sum().backward()
        assert x.grad is not None and bool((x.grad == 1).all())


def test_scale_brings_the_largest_value_to_448() -> None:
    x = torch.tensor([[0.5, -7.0], [0.0, 0.0]])
    spec = FLOAT8.replace(granularity=PerChannel(0))
    scale, zero_point = qparams_from_range(x.amin(1), x.amax(1), spec)
    assert scale.tolist() == pytest.approx([7 / 448, 1.0]) and not zero_point.any()


@pytest.mark.parametrize(("changes", "given"), [
    ({"bits": 4}, "4 bits"), ({"symmetric": False}, "symmetric=False"), ({"granularity": PerGroup(1, 32)}, "PerGroup"),
    ({"narrow": True}, "narrow=True"),
], ids=["bits", "affine", "group", "narrow"])  # fmt: skip
def test_what_the_format_does_not_have(changes: dict[str, object], given: str) -> None:
    with pytest.raises(SpecError, match=f"{given}.*fp8 has 8 bits, one scale per tensor or per channel"):
        FLOAT8.replace(**changes)


def test_unknown_format() -> None:
    with pytest.raises(SpecError, match=r"format='fp4': allowed: integer, float8"):
        TensorSpec(8, True, format="fp4")  # type: ignore[arg-type]


def test_wrong_number_of_scales_names_the_site() -> None:
    with pytest.raises(SpecError, match=r"fc.weight: 3 scales .* allowed: 1 or 4"):
        float8.fake_quantize(torch.randn(4, 2), torch.ones(3), 0, "fc.weight")


def test_integers_are_refused() -> None:
    with pytest.raises(SpecError, match=r"fc.weight: a tensor of torch.int64"):
        float8.fake_quantize(torch.ones(2, dtype=torch.int64), torch.ones(()), None, "fc.weight")


class Layer(nn.Module):
    spec = FLOAT8.replace(granularity=PerChannel(0))

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 5))
        self.register_buffer("scale", torch.full((8,), 0.004))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.scale, Tensor)
        weight = fake_quantize(self.weight, self.scale, torch.zeros(8), self.spec, tag="fc.weight")
        return nn.functional.linear(x, weight)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(
    ("shape", "num_scales", "axis"), [((4, 6), 1, None), ((4, 6), 4, 0), ((2, 6, 3, 3), 6, 1)], ids=str
)
def test_torch_finds_no_fault(shape: tuple[int, ...], num_scales: int, axis: int | None, learned: bool) -> None:
    x = torch.randn(shape)
    if x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    torch.library.opcheck(OPERATOR, (x.requires_grad_(learned), torch.rand(num_scales) + 0.1, axis, "site"))


def test_compiles_into_one_graph() -> None:
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    found = []
    for call in (compiled, layer):
        layer.zero_grad()
        y = call(torch.ones(3, 5))
        y.square().sum().backward()
        assert layer.weight.grad is not None
        found.append((y.detach(), layer.weight.grad.clone()))
    torch.testing.assert_close(found[0], found[1])


def test_exports_as_one_node() -> None:
    layer, x = Layer(), torch.randn(3, 5)
    program = torch.export.export(layer, (x,))
    assert [node.args[-1] for node in program.graph.nodes if node.target is OPERATOR] == ["fc.weight"]
    assert torch.equal(program.module()(x), layer(x))


def test_autocast_keeps_the_type() -> None:
    layer, x = Layer(), torch.randn(3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert float8.fake_quantize(x, torch.ones(()), None).dtype == torch.float32
