from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.graph.capture import Captured, capture
from sparsebit.graph.nodes.node_names import NodeNames, node_name

X = torch.randn(2, 8)


class Block(nn.Module):
    def __init__(self, extra: bool = False) -> None:
        super().__init__()
        self.fc, self.extra = nn.Linear(8, 8), extra

    def forward(self, x: Tensor) -> Tensor:
        if self.extra:
            x = torch.sigmoid(x + 1)
        return x + F.gelu(self.fc(x))


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.cat([x, self.blocks(x)]), x]).sum(1)


class Forward(nn.Module):
    """A module with layers whose names are also those of ops, and the given forward."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.add, self.block, self.code = nn.Linear(8, 8), Block(), forward
        self.a, self.a_b = nn.Module(), Block()
        self.a.b_fc = Block()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x)


def names(captured: Captured, path: str = "") -> list[str]:
    nodes = captured.regions[path].graph_module.graph.nodes
    return [node_name(node) for node in nodes if node.op not in ("placeholder", "output")]


def names_of(forward: Any) -> list[str]:
    return names(capture(Forward(forward).eval()))


def test_functions_are_named_by_the_module_that_calls_them() -> None:
    blocks = [f"blocks.{number}.{op}" for number in (0, 1) for op in ("fc", "gelu", "add")]
    assert names(capture(Net(Block(), Block()))) == [*blocks, "cat", "cat_1", "sum"]


def test_a_change_in_one_block_renames_nothing_in_another() -> None:
    before, after = (names(capture(Net(Block(extra), Block()))) for extra in (False, True))
    assert set(after) - set(before) == {"blocks.0.sigmoid", "blocks.0.add_1"}
    assert set(before) < set(after)


def test_compiled_names_and_modules_made_on_the_spot_are_stable_too() -> None:
    class Spot(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.ReLU()(x) + 1

    def compiled(*blocks: nn.Module) -> set[str]:
        return {node.name for node in capture(Net(*blocks)).regions[""].graph_module.graph.nodes}

    assert {name for name in compiled(Block(), Spot()) if "_1_" in name} == {"blocks_1_relu0", "blocks_1_add"}
    assert {name for name in compiled(Spot(), Spot()) if "_1_" in name} == {"blocks_1_relu0", "blocks_1_add"}


def test_a_module_called_twice_counts_on() -> None:
    found = names_of(lambda self, x: self.block(self.block(x)))
    assert found == ["block.fc", "block.gelu", "block.add", "block.fc", "block.gelu_1", "block.add_1"]


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        pytest.param(lambda self, x: self.add(x + 1) + x, ["add_1", "add", "add_2"], id="layer-of-that-name"),
        pytest.param(lambda self, x: (x + 1) * self.scale, ["add_1", "scale", "mul"], id="parameter"),
        pytest.param(lambda self, x: x.max() + x.sum(), ["max", "sum", "add_1"], id="builtin"),
        pytest.param(lambda self, x: x.relu_().sub_(1), ["relu_", "sub_"], id="in-place"),
        pytest.param(lambda self, x: x.abs().to(torch.float64), ["abs", "to"], id="method"),
    ],
)
def test_names(forward: Any, expected: list[str]) -> None:
    assert names_of(forward) == expected


def test_names_that_differ_in_dots_alone_stay_apart() -> None:
    captured = capture(Forward(lambda self, x: self.a.b_fc(x) + self.a_b(x)).eval())
    nodes = list(captured.regions[""].graph_module.graph.nodes)
    assert {"a.b_fc.fc", "a.b_fc.add", "a_b.fc", "a_b.add"} <= set(names(captured))
    assert len({node_name(node) for node in nodes}) == len(nodes) == len({node.name for node in nodes})


def test_inputs_and_layers_of_one_name() -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.x(x)  # type: ignore[no-any-return]

    nodes = list(capture(Same()).regions[""].graph_module.graph.nodes)
    assert [node_name(node) for node in nodes[:2]] == ["x_1", "x"]


def test_regions_inside_an_untraced_module() -> None:
    class Untraced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x) if float(x.sum()) > 0 else x

    captured = capture(Net(Block(), Untraced()))
    assert names(captured, "blocks.1.block") == ["fc", "gelu", "add"]
    assert "blocks.1" in names(captured) and "blocks.0.add" in names(captured)


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("keep", [copy.deepcopy, _pickled])
def test_copies_keep_names(keep: Any) -> None:
    captured = capture(Net(Block(), Block()))
    graph_module = captured.regions[""].graph_module
    twins = keep(graph_module).graph.nodes
    assert [node_name(node) for node in twins] == [node_name(node) for node in graph_module.graph.nodes]


def test_the_second_of_a_name_is_numbered() -> None:
    given = NodeNames(["stem.add"])
    assert [given.new("stem", "add"), given.new("stem", "add"), given.new("", "add")] == [
        "stem.add_1",
        "stem.add_2",
        "add",
    ]
    assert given.new("", "<lambda>") == "_lambda_"
    assert [given.new("", "add_1"), given.new("", "add"), given.new("", "add")] == ["add_1", "add_2", "add_3"]
