from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.layer_graph import layer_graph
from sparsebit.records.layer_graph import GraphLayer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.second(x)


def test_layers_and_what_each_reads() -> None:
    assert layer_graph(capture(Net(), example=((torch.randn(2, 4),), {})).regions) == (
        GraphLayer("first", "linear"),
        GraphLayer("second.0", "relu", ("first",)),
        GraphLayer("second.1", "linear", ("second.0",)),
        GraphLayer("add", "add", ("first", "second.1")),
    )


def test_readers_of_a_hidden_layer_read_what_is_before_it() -> None:
    regions = capture(Net(), example=((torch.randn(2, 4),), {})).regions
    found = {layer.name: layer for layer in layer_graph(regions, is_hidden=lambda module: isinstance(module, nn.ReLU))}
    assert found["second.1"].inputs == ("first",) and "second.0" not in found
