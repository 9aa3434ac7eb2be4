from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.nodes.value_kinds import python_values, static_values, tensor_inputs

X = torch.randn(2, 3, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.my_training, self.linear = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        b, n = x.shape[0], x.size(1)
        half = (b * n - 1) // 2
        positions = torch.arange(n, device=x.device)
        table = self.my_training.abs()
        masked = x.masked_fill(x > 0, torch.finfo(x.dtype).min)
        y = F.dropout(self.linear(x) + table, training=self.training) + half
        return (y.transpose(1, 2) + positions).transpose(1, 2) + x[0] + masked.clamp(-1, 1)


def names(nodes: Any) -> set[str]:
    return {str(getattr(node.target, "__name__", node.target)) for node in nodes}


@pytest.mark.parametrize("with_example", [False, True], ids=["plain", "example"])
def test_python_values(with_example: bool) -> None:
    captured = capture(Model(), example=((X,), {}) if with_example else None)
    assert not captured.untraced
    graph = captured.regions[""].graph_module.graph
    python = python_values(graph)
    assert names(python) - {"guard"} == {"getattr", "getitem", "size", "mul", "sub", "floordiv", "finfo", "training"}
    tensors = {node for node in graph.nodes if node.op != "output"} - python
    assert names(tensors) == {
        "x", "arange", "my_training", "abs", "gt", "masked_fill", "linear", "add", "dropout", "transpose", "getitem",
        "clamp",
    }  # fmt: skip


def test_static_values() -> None:
    graph = capture(Model()).regions[""].graph_module.graph
    found = names(static_values(graph))
    assert {"my_training", "abs", "arange"} <= found
    assert not {"x", "linear", "dropout", "masked_fill", "output"} & found


def test_tensor_inputs() -> None:
    class Cat(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return torch.cat([x, y], dim=1).reshape(x.shape[0], -1)

    graph = capture(Cat()).regions[""].graph_module.graph
    python = python_values(graph)
    cat = next(n for n in graph.nodes if n.target is torch.cat)
    reshape = next(n for n in graph.nodes if n.target == "reshape")
    assert [n.name for n in tensor_inputs(cat.args[0], python)] == ["x", "y"]
    assert [n.name for n in tensor_inputs(reshape.args, python)] == ["cat"]
    assert [n.name for n in tensor_inputs({"a": cat, "b": [1, None]}, python)] == ["cat"]
