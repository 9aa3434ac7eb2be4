"""A linear layer with a packed weight: the plain definition everywhere, the programs on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparsebit.errors import SpecError
from sparsebit.kernels import packed_linear as packed_linear_file
from sparsebit.kernels.packed_linear import (
    FragmentWeight,
    definition,
    dequantized,
    fragment_weight,
    packed_linear,
    runs_on,
)


def parts(
    outputs: int, inputs: int, group: int, *, affine: bool = False, dtype: torch.dtype = torch.bfloat16, bits: int = 4
) -> tuple[Tensor, Tensor, Tensor | None]:
    codes = torch.randint(0, 1 << bits, (outputs, inputs))
    scales = (torch.rand(outputs, inputs // group) * 0.01 + 0.005).to(dtype)
    return codes, scales, torch.randint(0, 1 << bits, scales.shape) if affine else None


def on(device: str, weight: FragmentWeight) -> FragmentWeight:
    zeros = None if weight.zeros is None else weight.zeros.to(device)
    return FragmentWeight(weight.words.to(device), weight.scales.to(device), zeros, weight.outputs)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("affine", [False, True])
def test_the_weight_is_what_was_packed(group: int, affine: bool, bits: int) -> None:
    codes, scales, zeros = parts(40, 256, group, affine=affine, bits=bits)
    weight = fragment_weight(codes, scales, zeros, bits)
    assert weight.bits == bits
    offset = 1 << bits - 1 if zeros is None else zeros.repeat_interleave(group, 1)
    expected = (codes - offset).to(torch.bfloat16) * scales.repeat_interleave(group, 1)
    assert torch.equal(dequantized(weight), expected)
    assert (weight.outputs, weight.inputs, weight.group_size) == (40, 256, group)
    x = torch.randn(2, 3, 256, dtype=torch.bfloat16)
    assert torch.equal(packed_linear(x, weight), definition(x, weight))  # no GPU here: the definition


@pytest.mark.parametrize(
    ("codes", "scales", "message"),
    [
        (torch.zeros(16, 100), torch.ones(16, 1, dtype=torch.bfloat16), "multiple of 128"),
        (torch.zeros(16, 128), torch.ones(16, 8, dtype=torch.bfloat16), "groups of 32, 64, 128"),
        (torch.zeros(16, 128), torch.ones(16, 0, dtype=torch.bfloat16), "groups of 32, 64, 128"),
        (torch.zeros(16, 128), torch.ones(8, 1, dtype=torch.bfloat16), r"scales \(8, 1\)"),
        (torch.zeros(16, 128), torch.ones(16, 1), "scales are torch.float32"),
    ],
)
def test_refused(codes: Tensor, scales: Tensor, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        fragment_weight(codes, scales)


def test_codes_and_zero_points_of_more_bits_are_refused() -> None:
    codes, scales, zeros = parts(16, 128, 128, affine=True)
    assert zeros is not None
    with pytest.raises(SpecError, match="codes from 1 to 16; allowed: 0 to 15"):
        fragment_weight(codes.clamp(1, 14) + 2 * (codes > 13), scales)
    with pytest.raises(SpecError, match="zero points from -1"):
        fragment_weight(codes, scales, zeros - zeros.min() - 1)


def test_other_bits_are_refused() -> None:
    with pytest.raises(SpecError, match="5 bits; allowed: 2, 3, 4, 8"):
        fragment_weight(*parts(16, 128, 128), bits=5)


def test_x_of_another_type_or_width() -> None:
    weight = fragment_weight(*parts(16, 128, 128))
    for x in (torch.zeros(1, 128), torch.zeros(1, 64, dtype=torch.bfloat16)):
        with pytest.raises(SpecError, match=r"the weight takes torch\.bfloat16 with 128 inputs"):
            packed_linear(x, weight)


def test_compiled() -> None:
    weight = fragment_weight(*parts(40, 128, 64))
    x = torch.randn(2, 128, dtype=torch.bfloat16)
    compiled = torch.compile(packed_linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), packed_linear(x, weight))


def test_a_program_waits_where_scales_are_copied_and_belongs_to_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a CUDA graph a program may start before those in front of it end: such as the one that copies its scales."""
    launches: list[tuple[object, bool]] = []

    class Recorded:
        def __init__(self, device: object) -> None:
            self.device = device

        def launch(self, grid: object, threads: int, values: list[object], *, overlapped: bool) -> None:
            assert all(value.is_contiguous() for value in values if isinstance(value, Tensor))
            launches.append((self.device, overlapped))

    monkeypatch.setattr(packed_linear_file, "_processors", lambda device: (132, "90"))
    monkeypatch.setattr(packed_linear_file, "_compiled", lambda name, device, *_: Recorded(device))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    weight = fragment_weight(*parts(128, 256, 128))
    joined = replace(weight, scales=torch.cat([weight.scales, weight.scales], 1)[:, :128])
    for one in (weight, joined):
        packed_linear_file.Product(torch.zeros(1, 256, dtype=torch.bfloat16), one).few_rows()
    assert launches == [(None, True), (None, False)]


@pytest.fixture
def gpu() -> torch.device:
    device = torch.device("cuda")
    if not runs_on(device):
        pytest.skip("needs a GPU of compute capability 9.0 or newer")
    return device


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 3, 8, 9, 16, 17, 32, 48, 49, 64, 65, 128, 129, 256, 1000, 2000])
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 1024), (1000, 512), (4608, 4096), (16384, 256)])
def test_programs_compute_the_definition(gpu: torch.device, num_rows: int, outputs: int, inputs: int) -> None:
    weight = on("cuda", fragment_weight(*parts(outputs, inputs, 128)))
    x = torch.randn(num_rows, inputs, dtype=torch.bfloat16, device="cuda")
    exact = x.double() @ dequantized(weight).double().t()
    y = packed_linear(x, weight)
    assert y.shape == (num_rows, outputs)
    assert float((y.double() - exact).norm() / exact.norm()) < 3e-3  # bfloat16 of the result, and of the weight
    assert torch.equal(y, packed_linear(x, weight))  # the same bits every time


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [150, 190, 280, 310, 350, 384, 400, 410, 768, 1100, 3500])
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 128), (384, 6016), (8192, 1024), (17024, 2048)])
def test_tiles_that_do_not_fill_the_gpu(gpu: torch.device, num_rows: int, outputs: int, inputs: int) -> None:
    """Whole tiles for each block, then spans of the rest that blocks share."""
    with gpu:
        weight = fragment_weight(*parts(outputs, inputs, 128))
        x = torch.randn(num_rows, inputs, dtype=torch.bfloat16)
    exact = x.double() @ dequantized(weight).double().t()
    product = packed_linear_file.Product(x, weight)
    for y in (packed_linear(x, weight), product.many_rows()):
        wrong = (y.double() - exact).norm(dim=1) / exact.norm(dim=1)
        assert float(wrong.max()) < 4e-3
    assert torch.equal(product.many_rows(), product.many_rows())


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 40, 100, 300, 2000])
def test_x_that_begins_anywhere(gpu: torch.device, num_rows: int) -> None:
    weight = on("cuda", fragment_weight(*parts(256, 512, 128)))
    x = torch.randn(num_rows * 512 + 1, dtype=torch.bfloat16, device=gpu)[1:].view(num_rows, 512)
    assert torch.equal(packed_linear(x, weight), packed_linear(x.clone(), weight))


@pytest.mark.gpu
def test_many_rows_in_a_cuda_graph(gpu: torch.device) -> None:
    """What tells the copying unit about x is part of the graph: x may have another content, in the same place."""
    weight = on("cuda", fragment_weight(*parts(512, 1024, 128)))
    x = torch.randn(300, 1024, dtype=torch.bfloat16, device=gpu)
    packed_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = packed_linear(x, weight)
    for seed in range(3):
        x.copy_(torch.randn(300, 1024, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(y, packed_linear(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 12, 40, 64, 100, 200, 390, 2000])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_groups_zero_points_and_types(
    gpu: torch.device, num_rows: int, group: int, affine: bool, dtype: torch.dtype
) -> None:
    weight = on("cuda", fragment_weight(*parts(512, 1024, group, affine=affine, dtype=dtype)))
    x = torch.randn(num_rows, 1024, dtype=dtype, device="cuda")
    exact = x.double() @ dequantized(weight).double().t()
    error = float((packed_linear(x, weight).double() - exact).norm() / exact.norm())
    assert error < (3e-3 if dtype == torch.bfloat16 else 5e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("num_rows", [1, 12, 40, 64, 100, 200, 390])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(512, 1024, 32), (1000, 512, 64), (9216, 4096, 128)])
@pytest.mark.parametrize(
    ("affine", "dtype"), [(False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float16)], ids=str
)
def test_other_bits(
    gpu: torch.device, bits: int, num_rows: int, outputs: int, inputs: int, group: int, affine: bool, dtype: torch.dtype
) -> None:
    with gpu:
        weight = fragment_weight(*parts(outputs, inputs, group, affine=affine, dtype=dtype, bits=bits), bits)
        x = torch.randn(num_rows, inputs, dtype=dtype)
    exact = x.double() @ dequantized(weight).double().t()
    error = float((packed_linear(x, weight).double() - exact).norm() / exact.norm())
    assert error < (3e-3 if dtype == torch.bfloat16 else 5e-4)


@pytest.mark.gpu
def test_in_a_cuda_graph(gpu: torch.device) -> None:
    weight = on("cuda", fragment_weight(*parts(256, 256, 128)))
    x = torch.randn(2, 256, dtype=torch.bfloat16, device="cuda")
    expected = packed_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = packed_linear(x, weight)
    graph.replay()
    assert torch.equal(y, expected)


@pytest.mark.gpu
def test_products_that_read_each_other_in_a_cuda_graph(gpu: torch.device) -> None:
    """There a program starts while the one before it ends: it must not read x before that has written it."""
    weights = [on("cuda", fragment_weight(*parts(1024, 1024, 128))) for _ in range(3)]
    x = torch.zeros(1, 1024, dtype=torch.bfloat16, device=gpu)

    def chain() -> Tensor:
        y = x
        for number in range(24):
            y = packed_linear(y, weights[number % 3])
            if number % 4 == 3:
                y = y / y.abs().amax()
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for seed in range(50):
        x.copy_(torch.randn(1, 1024, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(y, chain()), seed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_gradient_is_an_error_and_never_lost_in_silence(device: str) -> None:
    """Layers that train have a backward of their own (`QuantLinear`); the product alone has none."""
    codes, scales, _ = parts(128, 128, 128)
    weight = on(device, fragment_weight(codes, scales))
    x = torch.randn(2, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="autograd"):
        packed_linear(x, weight).sum().backward()
