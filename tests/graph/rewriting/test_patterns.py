from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.graph.rewriting.patterns import MatchingNode, SubgraphMatcher, is_type


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn(self.conv(x)))
        z = x.sigmoid() + self.conv(y)
        return torch.cat([F.relu(z), y + y, y.mul(2)])


def find(*nodes: MatchingNode, model: nn.Module | None = None, **options: Any) -> list[dict[str, str]]:
    graph_module = fx.symbolic_trace(model or Model())
    matches = SubgraphMatcher(nodes, **options).find(graph_module)
    return [{name: node.name for name, node in match.items()} for match in matches]


def test_a_chain() -> None:
    matches = find(
        MatchingNode("conv", types=(nn.Conv2d,)),
        MatchingNode("bn", types=(nn.BatchNorm2d,), inputs=("conv",)),
        MatchingNode("act", types=(nn.ReLU, F.relu), inputs=("bn",)),
    )
    assert matches == [{"act": "relu", "bn": "bn", "conv": "conv"}]


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        pytest.param((nn.Conv2d,), ["conv", "conv_1"], id="module"),
        pytest.param((nn.modules.conv._ConvNd,), ["conv", "conv_1"], id="base-class"),
        pytest.param((F.relu,), ["relu_1"], id="function"),
        pytest.param(("sigmoid", "mul"), ["sigmoid", "mul"], id="method"),
        pytest.param((nn.ReLU, F.relu, "relu"), ["relu", "relu_1"], id="any-form"),
        pytest.param((torch.cat, operator.add), ["add", "add_1", "cat"], id="operators"),
    ],
)
def test_types(types: tuple[Any, ...], expected: list[str]) -> None:
    assert [match["node"] for match in find(MatchingNode("node", types=types))] == expected


def test_no_types_is_anything() -> None:
    graph_module = fx.symbolic_trace(Model())
    assert all(is_type(node, (), graph_module) for node in graph_module.graph.nodes)
    assert not is_type(next(iter(graph_module.graph.nodes)), (nn.Conv2d, "x"), graph_module)


def test_inputs_in_order_and_unordered() -> None:
    conv, sigmoid = MatchingNode("conv", types=(nn.Conv2d,)), MatchingNode("sigmoid", types=("sigmoid",))
    for names, unordered, count in [
        (("sigmoid", "conv"), False, 1),
        (("conv", "sigmoid"), False, 0),
        (("conv", "sigmoid"), True, 1),
        ((None, "conv"), False, 1),
        (("conv", None), True, 1),
    ]:
        used = [node for node in (conv, sigmoid) if node.name in names]
        add = MatchingNode("add", types=(operator.add,), inputs=names, unordered=unordered)
        assert len(find(*used, add)) == count, (names, unordered)


def test_unordered_tries_every_order_of_many_inputs() -> None:
    node = MatchingNode("mul", types=("mul",))
    cat = MatchingNode("cat", types=(torch.cat,), inputs=("mul",), unordered=True)
    assert len(find(node, cat)) == 1
    middle = MatchingNode("add", types=(operator.add,), checker=lambda node, _: len(node.users) == 1)
    assert len(find(middle, MatchingNode("cat", types=(torch.cat,), inputs=("add", None), unordered=True))) == 1


def test_the_same_value_twice() -> None:
    relu = MatchingNode("relu", types=(nn.ReLU,))
    assert len(find(relu, MatchingNode("add", types=(operator.add,), inputs=("relu", "relu")))) == 1
    other = MatchingNode("other", types=(nn.ReLU,))
    assert len(find(relu, other, MatchingNode("add", types=(operator.add,), inputs=("relu", "other")))) == 1


def test_one_node_under_two_names_must_be_one_node() -> None:
    class Diamond(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b = x.relu(), x.relu()
            return a.exp() + a.tanh() + (a.exp() + b.tanh())

    relu = MatchingNode("relu", types=("relu",))
    exp, tanh = (MatchingNode(name, types=(name,), inputs=("relu",)) for name in ("exp", "tanh"))
    add = MatchingNode("add", types=(operator.add,), inputs=("exp", "tanh"))
    assert [match["add"] for match in find(relu, exp, tanh, add, model=Diamond())] == ["add"]


def test_checkers() -> None:
    def small(node: fx.Node, module: nn.Module | None) -> bool:
        return isinstance(module, nn.Conv2d) and next(iter(node.all_input_nodes)).op == "placeholder"

    assert find(MatchingNode("conv", checker=small)) == [{"conv": "conv"}]

    def same_width(match: dict[str, fx.Node], root: fx.GraphModule) -> bool:
        return root.get_submodule("conv") is not None and match["bn"].args[0] is match["conv"]

    pattern = (MatchingNode("conv", types=(nn.Conv2d,)), MatchingNode("bn", types=(nn.BatchNorm2d,), inputs=("conv",)))
    assert len(find(*pattern, joint_checkers=[same_width])) == 1
    assert find(*pattern, joint_checkers=[same_width, lambda match, root: False]) == []


def test_a_joint_checker_may_choose_among_orders() -> None:
    a, b = MatchingNode("a"), MatchingNode("b")
    add = MatchingNode("add", types=(operator.add,), inputs=("a", "b"), unordered=True)
    matches = find(a, b, add, joint_checkers=[lambda match, root: match["a"].name == "conv_1"])
    assert matches == [{"add": "add", "a": "conv_1", "b": "sigmoid"}]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        pytest.param((), "needs nodes", id="empty"),
        pytest.param((MatchingNode("a"), MatchingNode("a")), "name of its own", id="same-name"),
        pytest.param((MatchingNode("a", inputs=("b",)),), r"\['b'\] are not defined", id="undefined"),
        pytest.param((MatchingNode("a"), MatchingNode("b")), r"\['a'\].*do not feed 'b'", id="unreachable"),
    ],
)
def test_a_pattern_that_cannot_match_is_refused(nodes: tuple[MatchingNode, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SubgraphMatcher(nodes)
