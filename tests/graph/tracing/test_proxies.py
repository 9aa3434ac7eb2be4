"""Traced values answer Python's questions from the example, and other answers of another call are noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.nodes.example import guard


class Asking(nn.Module):
    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.linear, self.ask = nn.Linear(4, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.ask(x)


def unpack_rest(x: Tensor) -> Any:
    first, *rest = x.shape
    return first + sum(rest)


def loop(x: Tensor) -> Any:
    total = 0
    for row in x[0]:
        total = total + row.sum()
    return total


def chain(x: Tensor) -> Any:
    return 2 if x.dtype in (torch.float32, torch.float64) and x.is_floating_point() and len(x.shape) == 2 else 3


QUESTIONS = {
    "int": lambda x: int(x.shape[0]) + 1, "float": lambda x: float(x.shape[1]) ** 0.5,
    "index": lambda x: [1, 2, 3, 4][x.shape[0]], "range": lambda x: sum(range(x.shape[0])) + 1,
    "len": lambda x: len(x) + 1, "len-of-shape": lambda x: len(x.shape), "unpack-rest": unpack_rest, "chained": chain,
    "compare": lambda x: 1 if x.shape[0] == x.shape[1] else 2, "loop": loop, "min": lambda x: min(x.shape[0], 3) + 1,
    "one-or-true": lambda x: (2 if x.shape[0] else 3) * int(x.shape[0]),
}  # fmt: skip


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize("rows", [1, 2])
def test_answers_are_right_for_the_example_and_guarded_for_others(name: str, rows: int) -> None:
    model = Asking(QUESTIONS[name])
    captured = capture(model, example=((torch.randn(rows, 4),), {}))
    assert not captured.untraced
    region = captured.regions[""]
    for shape in [(rows, 4), (2, 4), (1, 4), (3, 4), (2, 2, 4)]:
        x = torch.randn(shape)
        if name in ("index", "loop") and len(shape) == 3:
            x = x[:2]
        torch.testing.assert_close(region(x), model(x))
    region.graph_module(torch.randn(rows, 4))  # every guard holds for the example that it was recorded with


def test_a_question_about_weights_needs_no_guard() -> None:
    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight if self.weight.shape[0] == 4 else x

    graph_module = capture(Weights(), example=((torch.randn(2, 4),), {})).regions[""].graph_module
    assert not graph_module.graph.find_nodes(op="call_function", target=guard)


def test_a_question_about_data_is_not_answered() -> None:
    captured = capture(Asking(lambda x: 2 if x.max() > 0 else 3), example=((torch.randn(2, 4),), {}))
    assert "" in captured.untraced


def test_a_guard_asked_for_in_given_up_code_is_asked_for_again() -> None:
    class GivesUp(nn.Module):
        def forward(self, x: Tensor, rows: Any) -> Tensor:
            if rows == 2 and x.sum() > 0:
                return x
            return -x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = GivesUp()

        def forward(self, x: Tensor) -> Tensor:
            rows = x.shape[0]
            is_two = rows == 2
            x = self.inner(x, rows) if is_two else x
            return x + 1 if is_two else x

    model = Model()
    captured = capture(model, example=((torch.randn(2, 4),), {}))
    for rows in (2, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(captured.model(x), model(x))


def test_without_an_example_unpacking_a_shape_still_works() -> None:
    model = Asking(lambda x: unpack(x))

    def unpack(x: Tensor) -> Any:
        b, c = x.shape
        return b * c

    captured = capture(model)
    assert not captured.untraced
    torch.testing.assert_close(captured.model(torch.ones(3, 4)), model(torch.ones(3, 4)))
    assert "" in capture(Asking(unpack_rest)).untraced
