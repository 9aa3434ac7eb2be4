from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.passes.simplify import simplify

X = torch.randn(2, 3, 4)


def simplified(forward: Any, **modules: nn.Module) -> tuple[nn.Module, Any]:
    model: nn.Module = type("Model", (nn.Module,), {"forward": forward})()
    for name, module in modules.items():
        model.add_module(name, module)
    return model, simplify(capture(model).regions[""].graph_module)


def ops(graph_module: Any) -> list[str]:
    nodes = [node for node in graph_module.graph.nodes if node.op not in ("placeholder", "output")]
    return [str(getattr(node.target, "__name__", node.target)) for node in nodes]


def test_identities_and_dead_code_go() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.linear(x)
        y = self.identity(self.identity(x))
        return self.identity(y.relu())

    model, graph_module = simplified(forward, identity=nn.Identity(), linear=nn.Linear(4, 4))
    assert ops(graph_module) == ["relu"]
    assert not list(graph_module.children())
    torch.testing.assert_close(graph_module(X), model(X))


def test_an_identity_from_input_to_output() -> None:
    _, graph_module = simplified(lambda self, x: self.identity(x), identity=nn.Identity())
    assert ops(graph_module) == [] and graph_module(X) is X


def test_an_identity_that_is_watched_stays() -> None:
    identity = nn.Identity()
    identity.register_forward_hook(lambda module, args, output: output * 2)
    model, graph_module = simplified(lambda self, x: self.identity(x), identity=identity)
    torch.testing.assert_close(graph_module(X), model(X))


def test_an_identity_with_a_constant_or_a_name() -> None:
    model, graph_module = simplified(lambda self, x: self.identity(input=x) * self.identity(2), identity=nn.Identity())
    torch.testing.assert_close(graph_module(X), model(X))


def test_asserts_go() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        torch._assert(x.shape[1] == 3, "three")
        return x + 1

    _, graph_module = simplified(forward)
    assert ops(graph_module) == ["add"]


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        pytest.param(lambda self, x: x.reshape(x.shape[0], -1), ["size", "reshape"], id="shape"),
        pytest.param(lambda self, x: x.reshape(x.size()[0], -1), ["size", "reshape"], id="size"),
        pytest.param(lambda self, x: x.reshape(x.shape[-1], -1), ["size", "reshape"], id="negative"),
        pytest.param(lambda self, x: x.reshape(x.size(0), -1), ["size", "reshape"], id="size-of-one"),
        pytest.param(lambda self, x: x + x.shape[1:][0], ["getattr", "getitem", "getitem", "add"], id="slice"),
        pytest.param(lambda self, x: x.unbind(1)[2] + x.unbind(dim=1)[0], ["select", "select", "add"], id="method"),
        pytest.param(lambda self, x: torch.unbind(x)[-1], ["select"], id="function"),
        pytest.param(lambda self, x: x[:1] + x[:, 0, None], ["getitem", "getitem", "add"], id="tensor-index"),
    ],
)
def test_shape_access_and_unbind(forward: Any, expected: list[str]) -> None:
    _, graph_module = simplified(forward)
    assert ops(graph_module) == expected
    torch.testing.assert_close(graph_module(X), forward(None, X))


def test_unbind_into_names() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = x.unbind(1)
        return q * k + v

    model, graph_module = simplified(forward)
    assert ops(graph_module)[:3] == ["select"] * 3
    torch.testing.assert_close(graph_module(X), model(X))
