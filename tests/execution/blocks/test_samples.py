from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sparsebit.execution.blocks import samples as block_samples
from sparsebit.execution.blocks.engine import BlockData, run_blocks
from sparsebit.execution.blocks.find_blocks import Block, whole_graph
from sparsebit.execution.blocks.samples import BlockSamples, Minibatch
from sparsebit.graph.capture import capture
from sparsebit.graph.values.nested import tensors_of


def looked_at(model: nn.Module, batches: list[Tensor], look: Callable[[BlockData], None]) -> None:
    """`look` at the whole model as one block."""
    graph_module = capture(model.eval()).regions[""].graph_module
    (name,) = [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"]

    def as_float(block: Block) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    blocks = whole_graph(graph_module)
    run_blocks(graph_module, blocks, len(batches), lambda i: {name: batches[i]}, look, as_float=as_float)


def drawn(model: nn.Module, batches: list[Tensor], size: int, count: int) -> tuple[str, list[Minibatch]]:
    found: list[Minibatch] = []
    modes: list[str] = []

    def look(data: BlockData) -> None:
        samples = BlockSamples(data)
        modes.append(samples.mode)
        stream = samples.minibatches(size, torch.Generator().manual_seed(0))
        found.extend(itertools.islice(stream, count))

    looked_at(model, batches, look)
    return modes[0], found


@pytest.mark.parametrize("chunk", [1 << 30, 1], ids=["together", "one by one"])
def test_every_sample_once_a_round_with_its_target(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_samples, "_CHUNK_BYTES", chunk)
    batches = [torch.arange(6.0).reshape(6, 1) + 6 * i for i in range(4)]
    mode, found = drawn(nn.Sequential(nn.Linear(1, 1)), batches, 3, 16)
    assert mode == "mixed" and all(len(batch.inputs[0]) == 3 for batch in found)
    values = [batch.inputs[0].flatten().tolist() for batch in found]
    assert sorted(itertools.chain(*values[:8])) == sorted(itertools.chain(*values[8:])) == list(range(24))
    assert values[:8] != values[8:]
    for batch in found:  # a line: targets follow from inputs
        slope = batch.targets[0].diff(dim=0) / batch.inputs[0].diff(dim=0)
        torch.testing.assert_close(slope, slope[:1].expand_as(slope), rtol=1e-3, atol=1e-5)


def test_batches_of_other_sizes_are_not_mixed() -> None:
    batches = [torch.randn(4, length, 3) for length in (5, 7)]
    mode, found = drawn(nn.Sequential(nn.Linear(3, 3)), batches, 2, 8)
    assert mode == "within" and {batch.inputs[0].shape for batch in found} == {(2, 5, 3), (2, 7, 3)}


class OverRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).softmax(0)


class FixedSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).reshape(4, 3)


@pytest.mark.parametrize("model", [OverRows(), FixedSize()], ids=["over rows", "fixed size"])
def test_rows_that_depend_on_each_other_stay_together(model: nn.Module) -> None:
    mode, found = drawn(model, [torch.randn(4, 3) for _ in range(2)], 2, 4)
    assert mode == "whole" and all(len(batch.inputs[0]) == 4 for batch in found)


def test_a_rest_is_left_out_but_a_small_set_is_used() -> None:
    _, found = drawn(nn.Sequential(nn.Linear(1, 1)), [torch.randn(9, 1)], 8, 3)
    assert [len(batch.inputs[0]) for batch in found] == [8, 8, 8]
    _, found = drawn(nn.Sequential(nn.Linear(1, 1)), [torch.randn(3, 1)], 8, 2)
    assert [len(batch.inputs[0]) for batch in found] == [3, 3]


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.layer(x).split([1, 3], 1)


def test_rows_of_tensors_in_a_tuple() -> None:
    batches = [torch.arange(6.0).reshape(6, 1) + 6 * i for i in range(2)]
    mode, found = drawn(Halves(), batches, 4, 3)
    assert mode == "mixed"
    for batch in found:
        parts = tensors_of(batch.targets)
        assert [part.shape for part in parts] == [(4, 1), (4, 3)]
        slope = parts[0].diff(dim=0) / batch.inputs[0].diff(dim=0)
        torch.testing.assert_close(slope, slope[:1].expand_as(slope), rtol=1e-3, atol=1e-5)


class Scaled(nn.Module):
    """`scale` crosses the border of the whole model, and has no rows."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale


def test_a_constant_that_is_as_long_as_a_batch_is_not_cut() -> None:
    scale, sizes = torch.tensor([1.0, 10.0, 100.0]), (6, 3)
    graph_module = capture(Scaled().eval()).regions[""].graph_module
    names = [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"]
    batches = [dict(zip(names, (torch.ones(size, 3), scale), strict=True)) for size in sizes]
    found: list[Minibatch] = []

    def look(data: BlockData) -> None:
        found.extend(itertools.islice(BlockSamples(data).minibatches(3, torch.Generator().manual_seed(0)), 8))

    blocks = whole_graph(graph_module)
    run_blocks(graph_module, blocks, 2, batches.__getitem__, look, as_float=lambda block: contextlib.nullcontext())
    for batch in found:
        assert torch.equal(batch.inputs[names.index("scale")], scale)
