"""A block that learns: its state can be kept elsewhere, and its result is what it computes with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.llm.checkpoint.packed_folder import FinishedBlock, Measured
from sparsebit.llm.quantizing.learned_block import LearnedBlock
from sparsebit.llm.quantizing.rounding import round_weight
from sparsebit.llm.recipe import Recipe

X = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))


def made(symmetric: bool = False, bits: int = 2) -> tuple[nn.Module, LearnedBlock]:
    torch.manual_seed(0)
    block: Any = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 8, bias=False))
    recipe = Recipe("rtn", bits, 32, symmetric)
    layers = {
        name: round_weight(block[int(name)].weight, None, recipe, name, stored=torch.float16).packed for name in "02"
    }
    finished = FinishedBlock(layers, others={"1.weight": torch.full((32,), 2.0)}, measured={"0": Measured(5, 0.1, 0.2)})
    return block, LearnedBlock(block, finished, (0.05, 0.01))


def learned(block: nn.Module, own: LearnedBlock, state: dict[str, Tensor], steps: int) -> dict[str, Tensor]:
    """Steps with a state that is copied in between, as from a disk."""
    for number in range(steps):
        state = {name: value.clone() for name, value in state.items()}
        own.take(state)
        gradients = torch.autograd.grad(block(X).square().sum(), own.parameters())
        own.step(state, gradients, number, 1.0)
        own.release()
    return state


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_result_is_what_it_computes_with(symmetric: bool, bits: int) -> None:
    block, own = made(symmetric, bits)
    before = own.result().layers
    assert all(torch.equal(before[name].dequantize(torch.float32), own.finished.layers[name].dequantize(torch.float32))
               for name in "02")  # fmt: skip
    state = learned(block, own, own.state(), 20)
    own.take(state)
    after = own.result()
    outputs = block(X).detach()
    own.close()
    plain: Any = block
    for name, weight in after.layers.items():
        plain[int(name)].weight = nn.Parameter(weight.dequantize(torch.float32))
        assert not torch.equal(weight.dequantize(torch.float32), before[name].dequantize(torch.float32))
    # Scales are rounded to float16 in the files, so that a code may become its neighbour.
    assert float((block(X).detach() - outputs).norm() / outputs.norm()) < 0.01
    assert torch.equal(after.others["1.weight"], torch.full((32,), 2.0)) and plain[1].weight[0] == 2
    assert after.measured == {"0": Measured(5)}


def test_the_loss_falls_and_a_copied_state_is_the_same() -> None:
    losses = []
    block, own = made()
    own.take(own.state())
    losses.append(float(block(X).detach().square().sum()))
    first = learned(block, own, own.state(), 15)
    own.take(first)
    losses.append(float(block(X).detach().square().sum()))
    assert losses[1] < 0.8 * losses[0]
    block, own = made()
    again = learned(block, own, own.state(), 15)
    assert all(torch.equal(again[name], first[name]) for name in first)


def test_weights_are_freed() -> None:
    block, own = made()
    own.state()
    own.release()
    assert all(one.is_meta for one in (block.get_parameter("0.weight"), block.get_parameter("2.weight")))
    assert not block.get_parameter("0.bias").is_meta and sum(one.numel() for one in own.parameters()) == 0
