from __future__ import annotations

from torch import Tensor, fx, nn

from sparsebit.graph.nodes.liveness import last_uses


class Model(nn.Module):
    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        a = x.relu()
        b = a.exp()
        x.tanh()
        c = a + b
        return c + b


def test_last_uses() -> None:
    graph = fx.symbolic_trace(Model()).graph
    uses = {node.name: [gone.name for gone in dying] for node, dying in last_uses(graph).items()}
    assert uses == {
        "x": [],
        "unused": ["unused"],
        "relu": [],
        "exp": [],
        "tanh": ["x", "tanh"],
        "add": ["relu"],
        "add_1": ["add", "exp"],
        "output": ["add_1"],
    }


def test_every_value_dies_once() -> None:
    graph = fx.symbolic_trace(Model()).graph
    dead = [gone for dying in last_uses(graph).values() for gone in dying]
    assert sorted(node.name for node in dead) == sorted(node.name for node in graph.nodes if node.op != "output")
