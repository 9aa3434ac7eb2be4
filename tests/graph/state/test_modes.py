"""Modes that are changed for a while are those of before afterwards, also where a graph does not hold the module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.state.modes import evaluating, without_gradients


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(self.layer(x)), training=self.training)


def test_every_module_has_its_own_mode_again_after_an_error() -> None:
    model = nn.Sequential(Block(), Block()).train()
    model[1].norm.eval()
    before = [module.training for module in model.modules()]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), evaluating(model):
        model(torch.zeros(2, 5))
    assert [module.training for module in model.modules()] == before


def test_the_modules_that_a_graph_was_traced_from_too() -> None:
    region = capture(nn.Sequential(Block(), nn.ReLU()).train(), example=((torch.randn(2, 4),), {})).model
    region.train()
    source = region.source
    source[0].norm.eval()
    before = {path: module.training for path, module in source.named_modules()}
    with evaluating(region):
        assert not any(module.training for module in source.modules())
    assert {path: module.training for path, module in source.named_modules()} == before


def test_only_parameters_that_required_gradients_do_so_again() -> None:
    model = Block()
    model.norm.requires_grad_(False)
    with without_gradients(model):
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == [
        "layer.weight", "layer.bias",
    ]  # fmt: skip
