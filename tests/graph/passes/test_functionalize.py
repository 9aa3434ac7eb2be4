from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.nodes.aliasing import overwritten
from sparsebit.graph.passes.functionalize import functionalize
from sparsebit.graph.passes.simplify import simplify

X = torch.randn(2, 3, 4)


def module(forward: Any) -> nn.Module:
    model: nn.Module = type("Model", (nn.Module,), {"forward": forward})()
    model.linear, model.relu, model.drop = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.5)
    model.register_buffer("steps", torch.zeros(4))
    return model.eval()


def rewritten(forward: Any, *, with_example: bool = False) -> tuple[nn.Module, Any]:
    model = module(forward)
    captured = capture(model, example=((X,), {}) if with_example else None)
    assert not captured.untraced
    graph_module = captured.regions[""].graph_module
    return model, simplify(functionalize(graph_module))


@torch.no_grad()
def check(graph_module: nn.Module, model: nn.Module) -> None:
    torch.testing.assert_close(graph_module(X.clone()), model(X.clone()), rtol=0, atol=0)


def writes(graph_module: Any) -> list[str]:
    return [node.name for node in graph_module.graph.nodes if overwritten(node, graph_module) is not None]


def ignored_module(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    before = y + 0
    self.relu(y)
    return y + before


def module_called_again(self: Any, x: Tensor) -> Tensor:
    y = self.relu(self.linear(x)) - 1
    self.relu(y)
    z = y * 2 - 1
    self.relu(z)
    return z


def ignored_function(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    F.relu(y, inplace=True)
    return y


def positional_flag(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    F.leaky_relu(y, 0.3, True)
    return y


def underscore_function(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    torch.relu_(y)
    F.elu_(y, 0.5)
    return y


def underscore_methods(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    y.mul_(2).add_(1)
    y.clamp_(min=0)
    return y.unsqueeze_(0)


def operators(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    alias = y
    y += x
    y *= 2
    y -= 1
    y /= 3
    y **= 2
    return alias + y


def sizes(self: Any, x: Tensor) -> Tensor:
    b = x.shape[0]
    kept = b
    b += 1
    b *= 2
    return self.linear(x) * b + kept


def setitem(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    before = y + 0
    y[:, 0] = 0
    y[..., -1:] = x[..., :1]
    return before + y


def dead_view(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x).flatten(1)
    y += 1
    return self.drop(y).relu_()


PLAIN = [
    ignored_module, module_called_again, ignored_function, positional_flag, underscore_function, underscore_methods,
    operators, sizes, setitem, dead_view,
]  # fmt: skip


@pytest.mark.parametrize("with_example", [False, True], ids=["plain", "example"])
@pytest.mark.parametrize("forward", PLAIN, ids=lambda forward: forward.__name__)
def test_an_in_place_op_becomes_a_plain_one(forward: Any, with_example: bool) -> None:
    model, graph_module = rewritten(forward, with_example=with_example)
    assert writes(graph_module) == []
    check(graph_module, model)


def view_read_later(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    y[:, 0].add_(1)
    return y


def view_taken_before(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    flat = y.reshape(-1)
    y.add_(1)
    return flat * 2


def through_dropout(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    z = self.drop(y)
    z += 1
    return y + z


def module_on_a_view(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    self.relu(y.transpose(1, 2))
    return y


def function_on_a_part(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    first, _ = y.chunk(2, dim=-1)
    F.relu(first, inplace=True)
    return y


def setitem_under_a_view(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    flat = y.flatten(1)
    y[:, 0] = 0
    return flat


def buffer(self: Any, x: Tensor) -> Tensor:
    self.steps.add_(1)
    return self.linear(x) + self.steps


def fill(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    y.fill_(2)
    return y * x


def flag(self: Any, x: Tensor) -> Tensor:
    return self.linear(x).requires_grad_() + 0


KEPT = [
    view_read_later, view_taken_before, through_dropout, module_on_a_view, function_on_a_part, setitem_under_a_view,
    buffer, fill, flag,
]  # fmt: skip


@pytest.mark.parametrize("with_example", [False, True], ids=["plain", "example"])
@pytest.mark.parametrize("forward", KEPT, ids=lambda forward: forward.__name__)
def test_a_write_that_others_see_stays_a_write(forward: Any, with_example: bool) -> None:
    model, graph_module = rewritten(forward, with_example=with_example)
    assert writes(graph_module)
    check(graph_module, model)
    check(graph_module, model)


def test_an_item_changed_in_place() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        y[:, 1] += 1
        y[:, 0] *= y[:, 1]
        return y

    model, graph_module = rewritten(forward)
    check(graph_module, model)


def test_an_item_of_a_list_or_dict() -> None:
    def forward(self: Any, x: list[Tensor], named: dict[str, Tensor]) -> Tensor:
        x[0] = self.linear(x[0])
        named["y"] = x[0] + 1
        return x[0] + named["y"]

    model = module(forward)
    graph_module = simplify(functionalize(capture(model).regions[""].graph_module))
    torch.testing.assert_close(graph_module([X, X], {}), model([X, X], {}), rtol=0, atol=0)


def test_a_module_that_must_write_in_one_call_is_right_in_all() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.relu(y)
        z = y - 1
        self.relu(z.flatten())
        return y + z

    model, graph_module = rewritten(forward)
    check(graph_module, model)


def test_the_caller_sees_what_is_written_into_its_tensor() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x += 1
        return self.linear(x)

    _, graph_module = rewritten(forward)
    x = X.clone()
    graph_module(x)
    assert torch.equal(x, X + 1)


def test_the_caller_sees_what_is_written_into_the_field_of_an_input() -> None:
    def forward(self: Any, batch: Any) -> Tensor:
        batch.first.add_(1)
        torch.view_as_complex(batch.second.unflatten(-1, (-1, 2))).mul_(2)
        return self.linear(batch.second)

    _, graph_module = rewritten(forward)
    batch = SimpleNamespace(first=X.clone(), second=X.clone())
    graph_module(batch)
    assert torch.equal(batch.first, X + 1)
    assert torch.equal(batch.second, X * 2)


@torch.no_grad()
@pytest.mark.parametrize("is_read", [True, False])
def test_the_models_own_code_keeps_the_module_that_writes(is_read: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        z = self.relu(y)
        return z if is_read else y

    model = module(forward)
    region = capture(model).regions[""]
    functionalize(region.graph_module)
    expected = model(X)
    assert torch.equal(region.graph_module(X), expected)
    assert torch.equal(region.source(X), expected)
