from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.errors import ConfigError
from sparsebit.execution.blocks.find_blocks import Flow, single_layers, with_gaps
from sparsebit.execution.blocks.search import find_blocks
from sparsebit.graph.capture import capture


def graph_of(model: nn.Module, *example: Tensor) -> fx.GraphModule:
    return capture(model.eval(), example=(example, {})).regions[""].graph_module


def names(model: nn.Module, *example: Tensor) -> list[str]:
    graph_module = graph_of(model, *example)
    blocks = find_blocks(graph_module)
    covered = [node for block in blocks for node in block.nodes]
    assert covered == [n for n in graph_module.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    return [block.name for block in blocks]


class Shortcut(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.b(torch.relu(self.a(x))) + x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(4, 4), nn.Sequential(Shortcut(), Shortcut()), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x).relu()))


class Layer(nn.Module):
    """Two shortcuts, as a transformer layer has, and a mask that every layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x)) * mask
        return x + self.down(F.gelu(self.up(x)))


class Encoder(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(9, 4), nn.ModuleList(), nn.Linear(4, 2)
        self.place = nn.Parameter(torch.randn(5, 4))
        self.layers.extend(Layer() for _ in range(depth))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place[: tokens.size(1)]
        mask = mask.unsqueeze(-1) * 2.0
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x.mean(1))


class UNet(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(8, 4) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
            x = x * 0.5
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], dim=-1))
        return x


def test_residual_blocks_are_one_and_plain_layers_one_each() -> None:
    assert names(Net(), torch.randn(2, 4)) == ["stem", "blocks.0", "blocks.1", "head"]


def test_plain_layers_take_the_activations_behind_them() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 4), nn.Softmax(-1))
    graph_module = graph_of(model, torch.randn(2, 4))
    blocks = find_blocks(graph_module)
    assert [[node.target for node in block.nodes] for block in blocks] == [["0", "1", "2", "3"], ["4", "5"]]


def test_a_transformer_layer_is_one_block_and_a_mask_crosses_all() -> None:
    example = (torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3))
    assert names(Encoder(6), *example) == ["embed", *(f"layers.{i}" for i in range(6)), "head"]


def test_long_skips_do_not_join_everything() -> None:
    found = names(UNet(8), torch.randn(2, 4))
    assert {"down.0.0", "down.0.2", "down.1.0", "up.6", "up.7"} <= set(found) and len(found) > 10


def test_a_shortcut_of_the_input_itself() -> None:
    assert names(nn.Sequential(Shortcut(), Shortcut()), torch.randn(2, 4)) == ["0", "1"]


def test_two_inputs_and_two_outputs() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            x = self.b(self.a(x).relu())
            return x, {"sum": x + self.c(y)}

    graph_module = graph_of(Towers(), torch.randn(2, 4), torch.randn(2, 4))
    blocks = find_blocks(graph_module)
    assert [block.name for block in blocks] == ["a", "b", "c"]
    assert [{node.name for node in block.inputs} for block in blocks] == [{"x"}, {"relu"}, {"y", "b"}]
    assert [[node.name for node in block.outputs] for block in blocks] == [["relu"], ["b"], ["add"]]


def test_values_that_share_written_memory_stay_in_one_block() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            view = y[:, :2]
            z = self.b(y)
            view.add_(1)
            return self.c(y) + z

    graph_module = graph_of(Writes(), torch.randn(2, 4))
    blocks = find_blocks(graph_module)
    owner = {node.name: block.name for block in blocks for node in block.nodes}
    assert owner["getitem"] == owner["add_"]


class TestNamed:
    def test_blocks_in_the_order_of_the_graph(self) -> None:
        graph_module = graph_of(Net(), torch.randn(2, 4))
        blocks = find_blocks(graph_module, ["head", "blocks.1", "blocks.0"])
        assert [block.name for block in blocks] == ["blocks.0", "blocks.1", "head"]
        assert list(blocks[0].modules) == ["blocks.0.a", "blocks.0.b"]
        parts = with_gaps(Flow(graph_module), blocks)
        assert [part.name for part, _ in parts] == ["", "blocks.0", "blocks.1", "head"]

    def test_an_unknown_name_is_told_with_near_ones(self) -> None:
        with pytest.raises(ConfigError, match=r"block 'blocks.7'.*near names: .*blocks"):
            find_blocks(graph_of(Net(), torch.randn(2, 4)), ["blocks.7"])

    def test_one_inside_the_other(self) -> None:
        with pytest.raises(ConfigError, match="inside the other"):
            find_blocks(graph_of(Net(), torch.randn(2, 4)), ["blocks", "blocks.0"])

    def test_what_lies_between_is_named(self) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.other = Shortcut(), nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(self.other(self.inner(x)))

        with pytest.raises(ConfigError, match=r"block 'inner': its nodes are not neighbours, 'other' runs between"):
            find_blocks(graph_of(Twice(), torch.randn(2, 4)), ["inner"])

    def test_blocks_of_another_graph_are_refused(self) -> None:
        one, other = (graph_of(Net(), torch.randn(2, 4)) for _ in range(2))
        blocks = find_blocks(one)
        with pytest.raises(ConfigError, match="not of this graph"):
            with_gaps(Flow(other), blocks)
        with pytest.raises(ConfigError, match="out of order"):
            with_gaps(Flow(one), blocks[::-1])


def test_single_layers() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act = nn.Linear(4, 4), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.act(self.fc(x)) + 1)

    graph_module = graph_of(Again(), torch.randn(2, 4))
    assert [block.name for block in single_layers(graph_module)] == ["fc", "act", "fc:1"]
    linear = single_layers(graph_module, lambda module: isinstance(module, nn.Linear))
    assert [block.name for block in linear] == ["fc", "fc:1"]


def test_a_plain_graph_module() -> None:
    traced = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    assert [block.name for block in find_blocks(traced)] == ["0", "2"]
