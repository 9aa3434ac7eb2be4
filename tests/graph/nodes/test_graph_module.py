from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.nodes.graph_module import CapturedGraph


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_a_graph_that_is_rewritten_is_compiled_when_it_is_called_and_when_it_is_settled() -> None:
    graph_module = capture(Doubles()).regions[""].graph_module
    assert isinstance(graph_module, CapturedGraph)
    x = torch.ones(2)
    graph_module.rewrite_until_settled()
    (node,) = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    for factor in (3, 4):
        node.args = (node.args[0], factor)
        graph_module.recompile()
        assert f"* {factor}" not in graph_module.code
        for twin in (copy.deepcopy(graph_module), graph_module):
            torch.testing.assert_close(twin(x), x * factor)
    graph_module.recompile()
    graph_module.settle()
    assert "* 4" in graph_module.code and "__call__" not in vars(type(graph_module))
    node.args = (node.args[0], 5)
    graph_module.recompile()  # settled: at once
    assert "* 5" in graph_module.code
