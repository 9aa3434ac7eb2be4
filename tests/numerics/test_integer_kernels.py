from __future__ import annotations

import platform
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebit.numerics import integer_kernels

numpy = pytest.importorskip("numpy")
onnxruntime = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

MACHINE = platform.machine()
CODES = torch.arange(256.0)
LEFT, RIGHT = (codes.reshape(-1) for codes in torch.meshgrid(CODES, CODES, indexing="ij"))
ARM = ("aarch64", "arm64")


def session(op: str) -> Any:
    """`com.microsoft` QLinearAdd or QLinearMul with everything as an input."""
    names = ["a", "scale_a", "zero_a", "b", "scale_b", "zero_b", "scale_c", "zero_c"]
    kinds = {"s": onnx.TensorProto.FLOAT, "a": onnx.TensorProto.UINT8}
    helper = onnx.helper
    inputs = [
        helper.make_tensor_value_info(name, kinds.get(name[0], kinds["a"]), ["n"] if len(name) == 1 else [])
        for name in names
    ]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["c"], domain="com.microsoft")],
        "g",
        inputs,
        [helper.make_tensor_value_info("c", onnx.TensorProto.UINT8, ["n"])],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def add_kernel() -> Any:
    return session("QLinearAdd")


@pytest.fixture(scope="module")
def multiply_kernel() -> Any:
    return session("QLinearMul")


def run(kernel: Any, a: Tensor, b: Tensor, scales: Tensor, zero_points: Tensor) -> Tensor:
    feeds = {"a": a, "b": b, "zero_a": zero_points[0], "zero_b": zero_points[1], "zero_c": zero_points[2]}
    arrays = {name: codes.to(torch.uint8).numpy() for name, codes in feeds.items()}
    arrays |= {f"scale_{name}": scale.numpy() for name, scale in zip("abc", scales, strict=True)}
    return torch.from_numpy(kernel.run(None, arrays)[0]).float()


def simulated(function: Any, a: Tensor, b: Tensor, scales: Tensor, zero_points: Tensor, **settings: Any) -> Tensor:
    values = [(codes - zero) * scale for codes, zero, scale in zip((a, b), zero_points, scales, strict=False)]
    result = function(*values, tuple(scales), tuple(zero_points), **settings)
    return (torch.round(result / scales[2]) + zero_points[2]).clamp(0, 255)


def numbers(kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """Three scales and three zero points. `usual`: like those of a network; `far`: the sum lives at another size."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(3, generator=generator)
    zero_points = torch.randint(0, 256, (3,), generator=generator).float()
    if kind == "usual":
        return 10 ** (draw - 2), zero_points
    if kind == "same":
        return torch.full((3,), float(draw[0]) + 0.01), torch.tensor([0.0, 128.0, 255.0])[torch.randperm(3)]
    scales = 10 ** (9 * draw - 6)
    if kind == "dead":  # one input is next to nothing: a residual branch that starts at zero
        scales = torch.stack([scales[2] * (0.1 + draw[0]), scales[2] * 10 ** (-7 * draw[1] - 3), scales[2]])
    return scales, zero_points


@pytest.mark.skipif(MACHINE not in ("x86_64", "AMD64", *ARM), reason=f"no known kernel for {MACHINE}")
@pytest.mark.parametrize("kind", ["usual", "same", "dead", "far"])
def test_add_is_the_runtimes_for_every_pair_of_codes(kind: str, add_kernel: Any) -> None:
    if kind == "far" and MACHINE not in ARM:
        pytest.skip("scales that no network has: looked at on Arm only")
    for seed in range(40):
        scales, zero_points = numbers(kind, seed)
        found = run(add_kernel, LEFT, RIGHT, scales, zero_points)
        mine = simulated(integer_kernels.add, LEFT, RIGHT, scales, zero_points)
        assert torch.equal(found, mine), f"{scales.tolist()}, {zero_points.tolist()}"


@pytest.mark.skipif(MACHINE not in ("x86_64", "AMD64"), reason="the x86 kernel runs on x86 only")
def test_add_of_x86_is_what_this_machine_takes_by_itself(add_kernel: Any) -> None:
    scales, zero_points = numbers("usual", 3)
    mine = simulated(integer_kernels.add, LEFT, RIGHT, scales, zero_points, machine="x86_64")
    assert torch.equal(run(add_kernel, LEFT, RIGHT, scales, zero_points), mine)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_machine_that_is_named_is_simulated_on_any_other(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scales, zero_points = numbers("usual", 3)
    named = simulated(integer_kernels.add, LEFT, RIGHT, scales, zero_points, machine=machine)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert torch.equal(simulated(integer_kernels.add, LEFT, RIGHT, scales, zero_points), named)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64" if machine == "x86_64" else "x86_64")
    assert not torch.equal(simulated(integer_kernels.add, LEFT, RIGHT, scales, zero_points), named)
    assert torch.equal(simulated(integer_kernels.add, LEFT, RIGHT, scales, zero_points, machine=machine), named)


@pytest.mark.parametrize("size", [1, 7, 16, 33])
def test_add_of_few_elements(size: int, add_kernel: Any) -> None:
    scales, zero_points = numbers("usual", size)
    order = torch.randperm(len(LEFT))[:size]
    a, b = LEFT[order], RIGHT[order]
    assert torch.equal(
        run(add_kernel, a, b, scales, zero_points), simulated(integer_kernels.add, a, b, scales, zero_points)
    )


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("kind", ["usual", "same", "dead"])
def test_add_is_within_a_step_of_the_real_sum_on_every_machine(machine: str, kind: str) -> None:
    for seed in range(10):
        scales, zero_points = numbers(kind, seed)
        a, b, c = scales.double()
        exact = ((LEFT - zero_points[0]) * a + (RIGHT - zero_points[1]) * b) / c + zero_points[2]
        mine = simulated(integer_kernels.add, LEFT, RIGHT, scales, zero_points, machine=machine)
        assert float((mine - exact.clamp(0, 255)).abs().max()) <= 0.501


@pytest.mark.parametrize("kind", ["usual", "same", "far"])
def test_multiply_is_the_runtimes_for_every_pair_of_codes(kind: str, multiply_kernel: Any) -> None:
    for seed in range(40):
        scales, zero_points = numbers(kind, seed)
        found = run(multiply_kernel, LEFT, RIGHT, scales, zero_points)
        mine = simulated(integer_kernels.multiply, LEFT, RIGHT, scales, zero_points)
        assert torch.equal(found, mine), f"{scales.tolist()}, {zero_points.tolist()}"


def test_codes_of_values_on_a_grid_are_whole() -> None:
    scale = torch.tensor(0.0371)
    assert torch.equal(integer_kernels.codes_from_zero((CODES - 128) * scale, scale), CODES - 128)


def test_requantized_rounds_once() -> None:
    accumulator = torch.tensor([10.0, 11.0, -10.0, 7.0])
    found = integer_kernels.requantized(accumulator, torch.tensor(0.25), torch.tensor(2.0))
    assert found.tolist() == [4.0, 6.0, -4.0, 4.0]  # halves to the even code


@pytest.mark.parametrize(
    ("zero_point", "steps_above_one", "expected"), [(0, 0.4, True), (0, 0.6, False), (1, 0.4, False), (0, -20, True)]
)
def test_saturates_as_hard_sigmoid(zero_point: int, steps_above_one: float, expected: bool) -> None:
    """The largest code may be up to half a step above 1."""
    scale = 1 / (255 - steps_above_one)
    assert integer_kernels.saturates_as_hard_sigmoid(scale, zero_point, 0, 255) is expected


def test_fixed_point_multipliers_have_at_most_22_bits() -> None:
    assert integer_kernels._fixed_point(1.0, 0.25) == (21, 1 << 21, 1 << 19)
    assert integer_kernels._fixed_point(1 - 2.0**-24, 0.25) is None  # rounded to 2^22
