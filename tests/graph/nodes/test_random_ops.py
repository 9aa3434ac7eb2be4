from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsebit.graph.nodes.random_ops import may_draw, module_may_draw


def called(function: Any) -> str:
    return getattr(function, "__name__", str(function))


@pytest.mark.parametrize(
    "function",
    [
        torch.rand, torch.randint, torch.normal, "bernoulli", "multinomial", "random_", F.dropout, F.dropout2d, F.rrelu,
        F.gumbel_softmax, F.fractional_max_pool2d, F.multi_head_attention_forward, F.scaled_dot_product_attention,
    ],
    ids=called,
)  # fmt: skip
def test_functions_that_draw(function: Any) -> None:
    assert may_draw(function)


@pytest.mark.parametrize(
    "function", [torch.relu, "view", "add_", F.max_pool2d, F.layer_norm, F.interpolate], ids=called
)
def test_functions_that_do_not(function: Any) -> None:
    assert not may_draw(function)


def test_modules_that_draw() -> None:
    drawing = [nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout(), nn.RReLU(), nn.FractionalMaxPool2d(2, 2), nn.LSTM(2, 2)]
    plain = [nn.Linear(2, 2), nn.ReLU(), nn.MaxPool2d(2), nn.LayerNorm(2), nn.BatchNorm2d(2), nn.Embedding(2, 2)]
    assert all(map(module_may_draw, drawing))
    assert not any(map(module_may_draw, plain))


def test_what_a_function_closes_over_or_calls_is_looked_into() -> None:
    chosen = F.dropout

    def inner(x: Any) -> Any:
        return chosen(x)

    def outer(x: Any) -> Any:
        return inner(x)

    assert may_draw(outer)
    assert not may_draw(lambda x: F.relu(x))
