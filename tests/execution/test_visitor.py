from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from sparsebit.execution.value_store import SharedData
from sparsebit.execution.visitor import GraphVisitor
from sparsebit.graph.capture import capture


def visited(
    model: nn.Module, batches: list[dict[str, Any]], store: SharedData | None = None, runs: int = 1
) -> dict[str, list[Any]]:
    """Every node's values as a visitor sees them."""
    graph_module = capture(model).regions[""].graph_module
    seen: dict[str, list[Any]] = {}

    def visit(node: fx.Node, run: Callable[[], Iterator[Any]]) -> None:
        for _ in range(runs):
            seen[node.name] = list(run())

    store = SharedData() if store is None else store
    GraphVisitor(graph_module, store).run(len(batches), batches.__getitem__, visit)
    assert len(store) == 0 and store.host_bytes == 0 and store.disk_bytes == 0
    return seen


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y = self.a(x)
        z = torch.cat([self.b(y.relu()) * self.gain, y], dim=0)
        return z.reshape(z.shape[0] // 2, -1)


@pytest.mark.parametrize("host_bytes", [1 << 20, 0], ids=["memory", "disk"])
@pytest.mark.parametrize("runs", [0, 1, 3])
def test_values_equal_those_of_the_model(host_bytes: int, runs: int) -> None:
    model = Residual()
    batches = [{"x": torch.randn(2 + i, 4)} for i in range(3)]
    seen = visited(model, batches, SharedData(host_bytes=host_bytes), runs)
    if runs:
        for got, batch in zip(seen["reshape"], batches, strict=True):
            torch.testing.assert_close(got, model(**batch))
    assert "gain" not in seen  # parameters are read where they live


class Chain(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(length)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_values_are_dropped_at_their_last_use() -> None:
    peak = []

    class Watched(SharedData):
        def put(self, key: Any, value: Any) -> None:
            super().put(key, value)
            peak.append(self.host_bytes)

    batches = [{"x": torch.randn(4, 256)} for _ in range(3)]
    visited(Chain(12), batches, Watched())
    one = 3 * 4 * 256 * 4
    assert max(peak) == 2 * one  # an op's input and its output, nothing else


def test_parameters_do_not_count_against_the_budget() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(1000, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.table.T).sum(1)

    batches = [{"x": torch.randn(1, 4)} for _ in range(4)]
    sizes = []

    class Watched(SharedData):
        def put(self, key: Any, value: Any) -> None:
            super().put(key, value)
            sizes.append(max((t.numel() for t in [value] if isinstance(t, Tensor)), default=0))

    visited(Wide(), batches, Watched(host_bytes=1 << 20))
    assert sizes.count(4000) == 4  # its transpose, once per batch; the table itself never


class Writes(nn.Module):
    """Writes that stay writes: through views, by item, by an opaque module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.relu = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y[:, 0].add_(1)
        y[:, 1] = 7
        self.relu(y.flatten())
        x += 1
        return y + x


@pytest.mark.parametrize("host_bytes", [1 << 20, 0], ids=["memory", "disk"])
def test_writes_are_seen_once_however_often_a_node_is_visited(host_bytes: int) -> None:
    model = Writes()
    batches = [{"x": torch.randn(2, 4)} for _ in range(2)]
    kept = [batch["x"].clone() for batch in batches]
    with torch.no_grad():
        expected = [model(x.clone()) for x in kept]
    seen = visited(model, batches, SharedData(host_bytes=host_bytes), runs=3)
    torch.testing.assert_close(seen["add"], expected)
    assert all(torch.equal(batch["x"], x) for batch, x in zip(batches, kept, strict=True))  # the caller's data


def test_a_missing_input_takes_its_default() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    scale = graph.placeholder("scale", default_value=3)
    graph.output(graph.call_function(torch.mul, (x, scale)))
    seen: list[Any] = []
    graph_module = fx.GraphModule(nn.Module(), graph)
    visitor = GraphVisitor(graph_module, SharedData())
    visitor.run(1, lambda index: {"x": torch.ones(2)}, lambda node, run: seen.extend(run()))
    torch.testing.assert_close(seen, [torch.full((2,), 3.0)])


def test_an_error_leaves_nothing_behind() -> None:
    store = SharedData(host_bytes=0)

    def visit(node: fx.Node, run: Callable[[], Iterator[Any]]) -> None:
        if node.name == "b":
            raise KeyboardInterrupt

    graph_module = capture(Residual()).regions[""].graph_module
    with pytest.raises(KeyboardInterrupt):
        GraphVisitor(graph_module, store).run(2, lambda index: {"x": torch.randn(2, 4)}, visit)
    assert len(store) == 0 and store.disk_bytes == 0


def test_no_gradients() -> None:
    seen = visited(Residual(), [{"x": torch.randn(2, 4, requires_grad=True)}])
    assert not any(value.requires_grad for values in seen.values() for value in values if isinstance(value, Tensor))
