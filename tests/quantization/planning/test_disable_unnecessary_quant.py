from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.graph.ops.op_table import row_of
from sparsebit.quantization.planning.disable_unnecessary_quant import absorbed_by, chain_end


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))
        x = F.gelu(self.fc(x) + x)
        return torch.sigmoid(torch.relu(x + 1))


def names(activations: frozenset[str] | None) -> dict[str, str]:
    root = fx.symbolic_trace(Chain())
    rows = {node: row for node in root.graph.nodes if (row := row_of(node, root)) is not None}
    return {back.name: front.name for back, front in absorbed_by(root.graph, rows, activations).items()}


def test_chains_are_followed_to_their_one_activation() -> None:
    # gelu does not join an add, and a second activation joins nobody.
    assert names(None) == {"bn": "conv", "relu": "bn", "relu_1": "add_1"}


def test_a_runtime_absorbs_what_it_lists() -> None:
    assert names(frozenset()) == {"bn": "conv"}
    assert names(frozenset({"relu"})) == names(None)


def test_the_end_of_a_chain() -> None:
    root = fx.symbolic_trace(Chain())
    rows = {node: row for node in root.graph.nodes if (row := row_of(node, root)) is not None}
    absorbed = absorbed_by(root.graph, rows, None)
    by_name = {node.name: node for node in root.graph.nodes}
    assert chain_end(by_name["conv"], absorbed).name == "relu"
    assert chain_end(by_name["fc"], absorbed).name == "fc"
