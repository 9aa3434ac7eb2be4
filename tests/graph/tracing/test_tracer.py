from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.tracing.leaf_policy import LeafPolicy
from sparsebit.graph.tracing.tracer import LeafTracer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norms = nn.Linear(4, 4), nn.ModuleList([nn.LayerNorm(4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.norms[0](self.linear(x))


@pytest.mark.parametrize(
    ("module", "is_leaf"),
    [
        (nn.Linear(2, 2), True), (nn.LSTM(2, 2), True), (nn.MultiheadAttention(2, 1), True), (nn.Identity(), True),
        (nn.Sequential(), False), (nn.ModuleList(), False), (nn.ModuleDict(), False), (nn.Module(), False),
        (Block(), False),
        (nn.TransformerEncoderLayer(4, 1, 4), False),
        (nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)  # fmt: skip
def test_leaf_rules(module: nn.Module, is_leaf: bool) -> None:
    assert LeafPolicy().is_leaf(module, "a.b") is is_leaf


def test_skip_globs_and_extra_classes() -> None:
    policy = LeafPolicy(skip=("head*", "body.?.act"), extra=(Block,))
    assert policy.is_leaf(Block(), "anywhere")
    assert policy.is_leaf(nn.Sequential(), "head.mlp") and policy.is_skipped("body.1.act")
    assert not policy.is_skipped("body.10.act") and not policy.is_skipped("Head")
    assert not LeafPolicy(extra=(nn.Sequential,)).is_leaf(Block(), "x")


def test_globs_see_the_whole_path_below_a_prefix() -> None:
    model = nn.Sequential(Block(), Block())
    tracer = LeafTracer(LeafPolicy(skip=("encoder.layer.1",)), prefix="encoder.layer")
    targets = [node.target for node in tracer.trace(model).nodes if node.op == "call_module"]
    assert targets == ["0.linear", "0.norms.0", "1"]
    assert tracer.full_path("1") == "encoder.layer.1" and tracer.full_path("") == "encoder.layer"


def test_constants_are_no_inputs() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: float = 2.0, **extra: Any) -> Any:
            return x * scale + extra.get("shift", 0)

    graph = LeafTracer(LeafPolicy(), constants={"scale": 3.0, "shift": 1}).trace(Scaled())
    assert [node.target for node in graph.nodes if node.op == "placeholder"] == ["x"]
    graph_module = fx.GraphModule(nn.Module(), graph)
    assert graph_module(torch.ones(1)) == 4


def test_variable_arguments_are_refused() -> None:
    class Many(nn.Module):
        def forward(self, *values: Tensor) -> Tensor:
            return values[0]

    with pytest.raises(fx.proxy.TraceError, match=r"takes \*values"):
        LeafTracer(LeafPolicy()).trace(Many())


def test_torch_and_the_model_are_as_before_also_after_a_failure() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.state: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.state = x
            y = nn.ReLU()(self.block(x)) + torch.arange(x.shape[1])
            return y if y.sum() > 0 else x

    model = Fails().train()
    model.block.eval()
    saved = (torch.arange, torch.rand, nn.Module.__call__, nn.Module.__getattr__)
    with pytest.raises(fx.proxy.TraceError):
        LeafTracer(LeafPolicy()).trace(model)
    assert (torch.arange, torch.rand, nn.Module.__call__, nn.Module.__getattr__) == saved
    assert model.state is None and model.training is True and model.block.training is False
    assert list(model._modules) == ["block"]


def test_factories_take_traced_sizes_and_types() -> None:
    class Factories(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            n, options = x.shape[-1], {"dtype": x.dtype, "device": x.device}
            y = torch.arange(n, **options) + torch.zeros(n, **options) + torch.ones(x.shape, **options)
            y = y + torch.full((n,), 2.0) + torch.linspace(0, 1, n) + torch.eye(n)[0] + torch.tensor(n)
            return (x + y).clamp(min=torch.finfo(x.dtype).tiny)

    model = Factories()
    graph_module = fx.GraphModule(model, LeafTracer(LeafPolicy()).trace(model))
    for x in (torch.randn(2, 3), torch.randn(4, 7).double()):
        torch.testing.assert_close(graph_module(x), model(x))


def test_one_read_per_parameter() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.same = self.weight

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight + self.weight + self.same

    graph = LeafTracer(LeafPolicy()).trace(Reads())
    assert [node.target for node in graph.nodes if node.op == "get_attr"] == ["weight"]


@pytest.mark.parametrize("given", ["generator", "map iterator"])
def test_a_forward_that_gives_values_later_is_named(given: str) -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return (self.fc(y) for y in (x, x)) if given == "generator" else map(self.fc, (x, x))

    captured = capture(Later(), example=((torch.randn(2, 4),), {}))
    assert f"returns or passes on a {given}" in captured.untraced[""].reason
