"""Code outside the graph that may write into its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.nodes.hidden_writes import (
    code_may_write,
    function_may_write,
    may_write_parameters,
    module_may_write,
)


class Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[0] = 1
        return x


class Assigned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x


class Method(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.halve(x)

    def halve(self, x: Tensor) -> Tensor:
        return x.div_(2)


class Out(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, x, out=x)


class ByPosition(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x, True)


class Harmless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        nn.init.zeros_(self.fc.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.elu(F.relu(self.fc(x), False), 1.0)
        return y + F.dropout(x, 0.5, self.training)


def doubled(values: Tensor) -> Tensor:
    return values.mul_(2)


def through_another(values: Tensor) -> Tensor:
    return doubled(values)


class ByHelper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return through_another(x)


def clip(layer: Any) -> None:
    layer.weight.data.clamp_(-1, 1)


def clip_all(layer: Any) -> None:
    for tensor in layer.parameters():
        clip_one(tensor)


def clip_one(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.clamp_(-1, 1)


class Clips(nn.Module):
    def __init__(self, how: Any = clip) -> None:
        super().__init__()
        self.fc, self.how = nn.Linear(2, 2), how

    def forward(self, x: Tensor) -> Tensor:
        clip(self.fc)
        return self.fc(x)


class ClipsAll(Harmless):
    def forward(self, x: Tensor) -> Tensor:
        clip_all(self.fc)
        return self.fc(x)


class ClipsByAttribute(Harmless):
    def __init__(self) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, x: Tensor) -> Tensor:
        self.clip(self.fc)
        return self.fc(x)


def hooked() -> nn.Module:
    model = Harmless()
    model.fc.register_forward_pre_hook(lambda module, _: clip_one(module.weight))
    return model


def patched() -> nn.Module:
    model = Harmless()
    model.forward = lambda x: (clip(model.fc), model.fc(x))[1]  # type: ignore[assignment, method-assign, func-returns-value]
    return model


@pytest.mark.parametrize("build", [Clips, ClipsAll, ClipsByAttribute, hooked, patched])
def test_parameters_that_helper_functions_write(build: Any) -> None:
    assert may_write_parameters(nn.Sequential(nn.ReLU(), build()))
    assert not may_write_parameters(nn.Sequential(Harmless(), ByHelper.__bases__[0]()))


@pytest.mark.parametrize("kind", [Item, Assigned, Method, Out, ByPosition, ByHelper])
def test_code_that_writes_is_found(kind: type[nn.Module]) -> None:
    assert module_may_write(kind()) and module_may_write(nn.Sequential(nn.Identity(), kind()))


def test_code_that_only_computes_writes_nothing() -> None:
    assert not module_may_write(Harmless())


def holding(function: Any) -> nn.Module:
    model = Harmless()
    model.then = function
    return model


def hooked_by(function: Any) -> nn.Module:
    model = Harmless()
    model.register_forward_hook(lambda module, args, output: function(args[0]))
    return model


@pytest.mark.parametrize("build", [holding, hooked_by])
def test_functions_that_a_module_holds_count(build: Any) -> None:
    assert module_may_write(build(lambda x: x.detach().mul_(2))) and code_may_write(build(lambda x: x.detach().mul_(2)))
    assert not module_may_write(holding(lambda x: x * 2))


def test_a_class_without_a_module_of_its_own_is_the_users() -> None:
    made: dict[str, Any] = {"nn": nn}
    exec("class Made(nn.Module):\n    def forward(self, x):\n        return x.mul_(2)\n", made)
    assert made["Made"].__module__ == "builtins" and module_may_write(made["Made"]())


def test_a_module_that_works_in_place_writes() -> None:
    assert module_may_write(nn.Sequential(Harmless(), nn.ReLU(inplace=True)))


def test_only_code_that_is_no_graph_counts_in_a_captured_model() -> None:
    class Branches(Item):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    assert not code_may_write(capture(nn.Sequential(Item(), Harmless())).model)
    assert code_may_write(capture(nn.Sequential(Branches(), Harmless())).model)
    assert code_may_write(capture(nn.Sequential(Harmless(), nn.ReLU(inplace=True))).model)


def test_a_function_whose_source_is_not_known_may_write() -> None:
    made: dict[str, object] = {}
    exec("def double(x):\n    return x * 2\n", made)
    assert function_may_write(made["double"])  # type: ignore[arg-type]
