from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.nodes.aliasing import may_alias, overwritten, written_later


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x) if x.sum() > 0 else x


def graph_of(forward: Any) -> Any:
    model: nn.Module = type("Model", (nn.Module,), {"forward": forward})()
    model.linear, model.flatten, model.relu, model.inner = nn.Linear(4, 4), nn.Flatten(), nn.ReLU(), Inner()
    return capture(model).regions[""].graph_module


@pytest.mark.parametrize(
    ("forward", "aliases", "writes"),
    [
        pytest.param(lambda self, x: x + 1, False, False, id="add"),
        pytest.param(lambda self, x: self.linear(x), False, False, id="linear"),
        pytest.param(lambda self, x: self.relu(x), False, False, id="relu"),
        pytest.param(lambda self, x: x.view(-1), True, False, id="view"),
        pytest.param(lambda self, x: x.T, True, False, id="attribute"),
        pytest.param(lambda self, x: torch.flatten(x), True, False, id="function"),
        pytest.param(lambda self, x: self.flatten(x), True, False, id="module"),
        pytest.param(lambda self, x: x[:, 0], True, False, id="getitem"),
        pytest.param(lambda self, x: x.dsplit(2), True, False, id="dsplit"),
        pytest.param(lambda self, x: torch.view_as_complex(x), True, False, id="view_as_complex"),
        pytest.param(lambda self, x: torch.view_as_real(x), True, False, id="view_as_real"),
        pytest.param(lambda self, x: x.unsafe_chunk(2), True, False, id="unsafe_chunk"),
        pytest.param(lambda self, x: torch.einsum("ij->ji", x), True, False, id="einsum"),
        pytest.param(lambda self, x: torch.einsum("ij,jk->ik", x, x + 1), False, False, id="einsum of two"),
        pytest.param(lambda self, x: x.float(), True, False, id="conversion"),
        pytest.param(lambda self, x: x.shape, False, False, id="shape"),
        pytest.param(lambda self, x: x & x, False, False, id="and"),
        pytest.param(lambda self, x: self.inner(x), True, True, id="opaque"),
        pytest.param(lambda self, x: x.add_(1), True, True, id="method"),
        pytest.param(lambda self, x: F.relu(x, True), True, True, id="flag"),
        pytest.param(lambda self, x: F.relu(x, False), False, False, id="flag-off"),
        pytest.param(lambda self, x: torch.relu_(x), True, True, id="underscore"),
        pytest.param(lambda self, x: torch.add(1, x, out=x), False, True, id="out"),
    ],
)
def test_one_op(forward: Any, aliases: bool, writes: bool) -> None:
    graph_module = graph_of(forward)
    node = [node for node in graph_module.graph.nodes if node.op not in ("placeholder", "output")][-1]
    assert (overwritten(node, graph_module) is not None) is writes
    if node.kwargs.get("out") is None:
        assert bool(list(may_alias(node, graph_module))) is aliases


def test_written_later() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        z = y.flatten(1)
        kept = self.relu(x)
        z[:, 0].add_(1)
        return y + kept

    graph_module = graph_of(forward)
    written = {node.name for node in written_later(graph_module)}
    assert {"linear", "flatten_1", "getitem"} <= written  # a layer of the model is called flatten
    assert not {"x", "relu", "add"} & written
