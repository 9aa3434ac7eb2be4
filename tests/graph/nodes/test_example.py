from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.nodes.example import GIVEN, UNKNOWN, Example, GuardError, guard


@pytest.mark.parametrize(
    ("value", "expected", "holds"),
    [
        pytest.param(True, True, True, id="bool"),
        pytest.param(0, True, False, id="bool-differs"),
        pytest.param(3, 3, True, id="int"),
        pytest.param(1, True, True, id="one-is-true"),
        pytest.param(2.5, 2.5, True, id="float"),
        pytest.param("x", 3, False, id="wrong-kind"),
        pytest.param(None, 3, False, id="none-for-a-number"),
        pytest.param([1, 2], 2, True, id="length"),
        pytest.param(torch.zeros(4, 2), 4, True, id="length-of-a-tensor"),
        pytest.param(torch.zeros(4, 2), 3, False, id="length-differs"),
        pytest.param({"a": 1, "b": 2}, ("a", "b"), True, id="keys"),
        pytest.param({"b": 1, "a": 2}, ("a", "b"), False, id="order-of-keys"),
        pytest.param(None, None, True, id="none"),
        pytest.param(torch.zeros(2), None, False, id="not-none"),
        pytest.param(torch.zeros(2), GIVEN, True, id="given"),
        pytest.param(None, GIVEN, False, id="not-given"),
    ],
)
def test_guard(value: Any, expected: Any, holds: bool) -> None:
    if holds:
        guard(value, expected, "here")
    else:
        with pytest.raises(GuardError, match=r"here: .* was captured"):
            guard(value, expected, "here")


def test_examples_have_no_data() -> None:
    example = Example()
    x = example.fake({"x": torch.randn(1000, 1000), "n": 3})
    assert x["n"] == 3 and x["x"].shape == (1000, 1000)
    assert example.evaluate(lambda: (x["x"] @ x["x"]).shape) == (1000, 1000)
    assert example.evaluate(lambda: x["x"].sum().item()) is UNKNOWN
    assert example.evaluate(lambda: 1 / 0) is UNKNOWN


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
    region.graph_module(torch.randn(rows, 4))  # no guard stands in its own example's way


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


def test_a_graph_keeps_shapes_but_no_tensors() -> None:
    graph = capture(Asking(lambda x: x.sum()), example=((torch.randn(2, 4),), {})).regions[""].graph_module.graph
    examples = {node.name: node.meta["example"] for node in graph.nodes if "example" in node.meta}
    assert examples["linear"].shape == (2, 4) and examples["sum_1"].dim() == 0
    assert all(type(example) is Tensor and example.is_meta for example in examples.values())


def test_without_an_example_sizes_of_weights_are_known_and_nothing_is_computed_with_them() -> None:
    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            if self.weight.dim() != 2 or self.weight.shape[0] // 2 != 2:
                return x
            return x @ (self.weight * 2)

    model = Weights()
    captured = capture(model)
    assert not captured.untraced
    graph = captured.regions[""].graph_module.graph
    assert "example" in graph.find_nodes(op="get_attr")[0].meta
    assert all(node.meta.get("example", UNKNOWN) is UNKNOWN for node in graph.nodes if node.name in ("mul", "matmul"))
    torch.testing.assert_close(captured.model(torch.ones(2, 4)), model(torch.ones(2, 4)))
