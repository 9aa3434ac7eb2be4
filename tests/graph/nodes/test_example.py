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


def test_a_graph_keeps_shapes_but_no_tensors() -> None:
    class Sums(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * x.sum()

    graph = capture(Sums(4, 4), example=((torch.randn(2, 4),), {})).regions[""].graph_module.graph
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
