from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.nodes.example import guard
from sparsebit.graph.rewriting.patterns import Match, MatchingNode
from sparsebit.graph.rewriting.rewrite import ReplacePatternBase, insert_module_after, sweep


class DropDoubleRelu(ReplacePatternBase):
    nodes = (MatchingNode("first", types=(nn.ReLU,)), MatchingNode("second", types=(nn.ReLU,), inputs=("first",)))

    def replace(self, match: Match, graph_module: fx.GraphModule) -> dict[str, fx.Node]:
        return {"second": match["first"]}


class Halve(ReplacePatternBase):
    """relu -> relu followed by two new ops, which read the old one."""

    nodes = (MatchingNode("relu", types=(nn.ReLU,)),)

    def replace(self, match: Match, graph_module: fx.GraphModule) -> dict[str, fx.Node]:
        with graph_module.graph.inserting_after(match["relu"]):
            negative = graph_module.graph.call_method("neg", (match["relu"],))
        with graph_module.graph.inserting_after(negative):
            return {"relu": graph_module.graph.call_method("mul", (negative, 0.5))}


class Double(ReplacePatternBase):
    """Never settles: one relu gives two."""

    nodes = (MatchingNode("relu", types=(nn.ReLU,)),)

    def replace(self, match: Match, graph_module: fx.GraphModule) -> dict[str, fx.Node]:
        with graph_module.graph.inserting_before(match["relu"]):
            first = graph_module.graph.call_module(str(match["relu"].target), match["relu"].args)
            return {"relu": graph_module.graph.call_module(str(match["relu"].target), (first,))}


def ops(graph_module: fx.GraphModule) -> list[str]:
    return [node.name for node in graph_module.graph.nodes if node.op not in ("placeholder", "output")]


def relus(count: int) -> fx.GraphModule:
    return fx.symbolic_trace(nn.Sequential(*[nn.ReLU() for _ in range(count)]))


def test_once_or_until_stable() -> None:
    graph_module = relus(4)
    assert DropDoubleRelu().apply(graph_module) == 3  # each match saw the graph as the one before it left it
    assert len(ops(graph_module)) == 1 and len(list(graph_module.children())) == 1

    class Pairwise(DropDoubleRelu):
        """Only where nothing follows: one place a round."""

        joint_checkers = (lambda match, root: next(iter(match["second"].users)).op == "output",)

    graph_module = relus(4)
    assert Pairwise().apply(graph_module) == 1
    graph_module = relus(4)
    assert Pairwise(until_stable=True).apply(graph_module) == 3
    x = torch.randn(3)
    torch.testing.assert_close(graph_module(x), x.relu())


def test_nothing_to_do() -> None:
    graph_module = relus(1)
    assert DropDoubleRelu(until_stable=True).apply(graph_module) == 0


def test_new_nodes_may_read_what_they_replace() -> None:
    graph_module = relus(2)
    assert Halve().apply(graph_module) == 2
    x = torch.randn(3)
    torch.testing.assert_close(graph_module(x), (-x.relu() / 2).relu() / -2)


def test_a_pattern_that_never_settles_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"Double still matches after .* rewrites.*until_stable=False"):
        Double(until_stable=True).apply(relus(2))
    graph_module = relus(2)
    assert Double().apply(graph_module) == 2 and len(ops(graph_module)) == 4


def test_leaving_a_match_alone_is_no_change() -> None:
    class Refuse(DropDoubleRelu):
        def replace(self, match: Match, graph_module: fx.GraphModule) -> dict[str, fx.Node]:
            return {} if match["first"].name == "_0" else {"second": match["second"]}

    graph_module = relus(3)
    assert Refuse(until_stable=True).apply(graph_module) == 0 and len(ops(graph_module)) == 3


def test_replace_must_be_written() -> None:
    class Empty(ReplacePatternBase):
        nodes = (MatchingNode("any", types=(nn.ReLU,)),)

    with pytest.raises(NotImplementedError, match="Empty must define replace"):
        Empty().apply(relus(1))


class Effects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.dead, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("unread", torch.zeros(1))

    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        self.dead(x) + self.unread
        y = self.used(x) if x.shape[0] == 2 else x
        self.relu(y.flatten())
        y[0] = 1
        self.steps.add_(1)
        return y


def test_sweep_keeps_effects_inputs_and_guards() -> None:
    captured = capture(Effects(), example=((torch.randn(2, 4), torch.randn(1)), {}))
    graph_module = captured.regions[""].graph_module
    sweep(graph_module)
    targets = [node.target for node in graph_module.graph.nodes]
    assert [node.target for node in graph_module.graph.nodes if node.op == "placeholder"] == ["x", "unused"]
    assert "dead" not in targets and {"used", "relu", "add_", guard} <= set(targets)
    assert sorted(name for name, _ in graph_module.named_children()) == ["relu", "used"]
    x = torch.randn(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(graph_module(x, x), captured.regions[""].source(x, x))
    assert graph_module.steps == 2


class Unread(nn.Module):
    """Results that are not read, of calls that do something besides."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.watched, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        self.plain(x)
        self.watched(x)
        self.norm(x)
        return x * 2


def test_sweep_keeps_hooks_and_statistics() -> None:
    model, calls = Unread(), []
    model.watched.register_forward_hook(lambda *_: calls.append(1))
    graph_module = capture(model).regions[""].graph_module
    sweep(graph_module)
    graph_module(torch.randn(3, 4))
    assert calls == [1]
    assert graph_module.norm.num_batches_tracked == 1
    assert "plain" not in [node.target for node in graph_module.graph.nodes]


class Draws(nn.Module):
    """Random numbers that are not read decide the ones that are."""

    def __init__(self, unread: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.unread = unread
        self.layer = unread if isinstance(unread, nn.Module) else None

    def forward(self, x: Tensor) -> Tensor:
        (self.layer or self.unread)(x)
        return x * torch.rand(())


@pytest.mark.parametrize(
    "unread",
    [
        lambda x: x + torch.randint(0, 3, x.shape),
        lambda x: torch.rand_like(x),
        lambda x: torch.normal(x, 1.0),
        lambda x: x.sigmoid().bernoulli(),
        lambda x: F.dropout(x, 0.5, training=True),
        lambda x: F.gumbel_softmax(x),
        lambda x: F.rrelu(x, training=True),
        nn.Dropout(0.5),
        nn.RReLU(),
    ],
    ids=["randint", "rand_like", "normal", "bernoulli", "dropout", "gumbel_softmax", "rrelu", "Dropout", "RReLU"],
)
def test_sweep_keeps_random_draws(unread: Callable[[Tensor], Any]) -> None:
    model, x = Draws(unread).train(), torch.randn(3, 4)
    graph_module = capture(model).regions[""].graph_module
    sweep(graph_module)
    results = []
    for run in (model, graph_module):
        torch.manual_seed(0)
        results.append(run(x))
    torch.testing.assert_close(results[1], results[0])


def test_sweep_keeps_modules_with_code_of_their_own() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counting = Counting()

        def forward(self, x: Tensor) -> Tensor:
            self.counting(x)
            return x * 2

    graph_module = capture(Model()).regions[""].graph_module
    sweep(graph_module)
    graph_module(torch.randn(3, 4))
    assert graph_module.counting.calls == 1


def test_insert_module_after() -> None:
    graph_module = fx.symbolic_trace(nn.Bilinear(2, 2, 2))
    first = next(iter(graph_module.graph.nodes))
    inserted = insert_module_after(graph_module, first, "scale", nn.Identity())
    graph_module.graph.lint()
    assert inserted.prev.op == "placeholder" and inserted.prev is not first and inserted.args == (first,)
    last = insert_module_after(graph_module, inserted, "again", nn.Identity())
    assert last.prev is inserted
    graph_module.recompile()
    x: Any = torch.randn(3, 2)
    assert graph_module(x, x).shape == (3, 2)
