from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebit.numerics import plain
from sparsebit.numerics.fake_quant import decomposed, gradients
from sparsebit.numerics.fake_quant.dispatch import fake_quantize
from sparsebit.numerics.spec import Granularity, PerChannel, PerGroup, PerTensor, TensorSpec, num_rows

GRANULARITIES = [PerTensor(), PerChannel(0), PerChannel(1), PerGroup(1, 4), PerGroup(1, 5)]


@pytest.mark.parametrize("gradient", ["ste", "lsq", "pact", "relu_lsq"])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_algebra_is_plain_torch(granularity: Granularity, gradient: str, dtype: torch.dtype) -> None:
    spec = TensorSpec(4, False, granularity)
    x = torch.randn(6, 12).to(dtype)
    shape = () if granularity.axis is None else (num_rows(x.shape, granularity),)
    scale, zero_point = torch.rand(shape) * 0.1 - 0.2, torch.randint(2, 12, shape).float()
    if gradient.startswith("relu_"):
        scale, zero_point = scale.abs(), torch.zeros(shape)
    numbers = (granularity.axis, granularity.size, spec.qmin, spec.qmax)
    found = decomposed.fake_quantize(x, scale, zero_point, *numbers, gradient, "the site's name")
    assert torch.equal(found, plain.fake_quantize(x, scale, zero_point, *numbers))
    learned = [(True, True, True), (False, True, False)] if gradient != "ste" else []
    for needs in ((True, False, False), *learned):
        arguments = (torch.randn_like(x), x, scale, zero_point, *numbers, gradient, *needs)
        expected = [tensor for tensor in gradients.backward(*arguments) if tensor is not None]
        for one, other in zip(decomposed.backward(*arguments), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_two_scales() -> None:
    x, grad, scale, zero_point = torch.randn(2, 6), torch.randn(2, 6), torch.tensor([0.2, 0.3]), torch.zeros(2)
    arguments = (grad, x, scale, zero_point, 0, 0, -2, 1, "lsq", True, True, True)
    for one, other in zip(decomposed.backward(*arguments), gradients.backward(*arguments), strict=True):
        assert other is not None
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own, at its import
def test_inductor_sees_the_algebra_even_if_it_compiled_something_before() -> None:
    torch._dynamo.reset()
    torch.compile(lambda x: x.relu() + 1)(torch.randn(4))  # inductor has copied its table by now
    spec = TensorSpec(4, True)

    def step(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return fake_quantize(x.relu(), scale, torch.zeros(()), spec, gradient="lsq").square().sum()

    x, scale = torch.randn(64, requires_grad=True), torch.tensor(0.1, requires_grad=True)
    expected = torch.autograd.grad(step(x, scale), (x, scale))
    compiled = torch.compile(step, fullgraph=True)
    torch.autograd.grad(compiled(x, scale), (x, scale))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = torch.autograd.grad(compiled(x, scale), (x, scale))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not any("sparsebit" in event.key for event in profile.key_averages())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(1), PerGroup(1, 4)], ids=str)
def test_one_compiled_graph_serves_batches_of_every_size(granularity: Granularity) -> None:
    torch._dynamo.reset()
    spec = TensorSpec(4, True, granularity)
    num_scales = {"tensor": 1, "channel": 8, "group": 2}[granularity.kind]  # of a row

    def step(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if granularity.kind == "group":  # as many scales as groups
            scale = scale.expand(x.shape[0], num_scales).reshape(-1)
        return fake_quantize(x, scale, torch.zeros_like(scale), spec, gradient="lsq").square().sum()

    from torch._inductor.compile_fx import compile_fx  # slow to import

    graphs = []

    def counting(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return compile_fx(graph, example)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counting)
    for size in (4, 6, 7):
        x, scale = torch.randn(size, 8, requires_grad=True), torch.full((num_scales,), 0.1, requires_grad=True)
        found, expected = (torch.autograd.grad(run(x, scale), (x, scale)) for run in (compiled, step))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert len(graphs) == 1


def heads() -> Tensor:
    """Queries of an attention: a part of a larger tensor, heads before tokens."""
    return torch.randn(2, 5, 3, 4, 64).permute(2, 0, 3, 1, 4)[1]


@pytest.mark.parametrize(
    ("terms", "num_sums"),
    [
        (torch.randn(4, 6, 8, 8).contiguous(memory_format=torch.channels_last), 6),  # a batch norm's: the channels
        (torch.randn(4, 6, 16, 16), 24),
        (torch.randn(2, 5, 384), 10),  # a layer norm's: the rows
        (torch.randn(2, 5, 1536), 10),
        (torch.randn(2, 5, 2048), 10),
        (torch.randn(2, 1500), 2),
        (heads(), 10),
        (torch.randn(3, 4), 1),
        (torch.randn(()), 1),
    ],
    ids=lambda value: "x".join(map(str, value.shape)) if isinstance(value, Tensor) else "",
)
def test_first_sums_have_the_form_of_the_memory(terms: Tensor, num_sums: int) -> None:
    found = decomposed._first_sums(terms)
    assert found.shape == (num_sums,)
    torch.testing.assert_close(found.sum(), terms.sum(), rtol=1e-4, atol=1e-3)
