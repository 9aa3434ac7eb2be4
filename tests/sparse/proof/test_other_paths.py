"""Paths that the example does not take: the smaller model equals the masked one on them too, or its channels stay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.sparse.channels.groups import drawn
from sparsebit.sparse.group_search import ChannelGroups, find_groups
from sparsebit.sparse.proof.bench import mask_units
from sparsebit.sparse.shrinking.surgery import apply_plan

Run = Callable[[nn.Module], Any]


class Net(nn.Module):
    """Two layers around a hidden width of 12, and two more that nothing odd touches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 8)
        self.c, self.d = nn.Linear(8, 10), nn.Linear(10, 3)
        self.width = 12
        self.scales = False

    def forward(self, x: Tensor, *rest: Any, **more: Any) -> Tensor:
        h = self.hidden(torch.relu(self.a(x)), x, *rest, **more)
        return self.d(torch.relu(self.c(torch.relu(self.b(h)))))

    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return h


class ByBatch(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            h = h / h.shape[-1] ** 0.5
        return h


class NormOfOne(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return F.layer_norm(h, h.shape[-1:]) if len(x) == 1 else h


class EarlyReturn(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        if x.shape[0] > 1:
            return h
        width = h.size(1)
        return h * width**-0.5


class InTraining(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        if self.training:
            h = h * h.shape[1]
        return F.dropout(h, 0.5, self.training)


class WithGradients(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return h / h.shape[1] if torch.is_grad_enabled() else h


class OfInputsWithGradients(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        if x.requires_grad:
            return h.softmax(-1) * h.size(-1)
        return h


class ByType(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        if h.dtype == torch.bfloat16:
            h = h / h.shape[-1] ** 0.5
        return h


class ByArgument(Net):
    def hidden(self, h: Tensor, x: Tensor, scale: bool = False) -> Tensor:
        if scale:
            h = h / h.shape[-1] ** 0.5
        return h


class ByExtraTensor(Net):
    """The branch cannot be run without the tensor, so it is read."""

    def hidden(self, h: Tensor, x: Tensor, extra: Tensor | None = None) -> Tensor:
        if extra is not None:
            scale = h.shape[-1] ** -0.5
            h = h * scale + extra
        return h


class ByAttribute(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return h * len(h[0]) if self.scales else h


class ByValue(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        if x.sum() > 1000:
            h = h / h.shape[-1]
        return h


class Where(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.where(x.sum() > 1000, h / h.shape[-1] ** 0.5, h)


class Gated(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        is_large = (x.sum() > 1000).to(h.dtype)
        return h * (1 - is_large) + h / h.shape[-1] * is_large


class ByLength(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return h.mean(-1, keepdim=True) + h if x.shape[1] > 100 else h


def scaled(h: Tensor) -> Tensor:
    return h / h.shape[-1] ** 0.5


class Helper(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return self._chosen(h) if h.shape[0] == 1 else h

    def _chosen(self, h: Tensor) -> Tensor:
        return scaled(h) if h.shape[0] == 1 else h


class Overwritten(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        number = h.shape[1]
        if x.shape[0] > 1:
            number = 1
        return h / number


class Arithmetic(Net):
    """No branch at all: a condition is a number."""

    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return h / h.shape[-1] ** (0.5 * (x.shape[0] == 1))


class Dispatch(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        ways: dict[bool, Callable[[Tensor], Tensor]] = {True: scaled, False: torch.relu}
        return ways[x.shape[0] == 1](h)


class Match(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        match x.shape[0]:
            case 1:
                return h / h.shape[1]
            case _:
                return h


class View(Net):
    """An attribute that only the other path needs follows."""

    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return h.reshape(1, self.width) if x.shape[0] == 1 else h


ONE, TWO = torch.linspace(-1, 2, 6)[None], torch.linspace(-1, 2, 12).view(2, 6)
NINE = torch.linspace(-1, 2, 54).view(9, 6)


class Rolled(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return h.roll(1, -1) if x.shape[0] == 9 else h


class PartOfChannels(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        if x.shape[0] == 9:
            h = h + h[:, :1]
        return h


class HalvesSwapped(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.cat(h.chunk(2, 1)[::-1], 1) if x.shape[0] == 9 else h


class SoftmaxByHand(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        if x.shape[0] == 9:
            powers = h.exp()
            return powers / powers.sum(1, keepdim=True)
        return h


class FunctionByName(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return getattr(self, "scaled" if x.shape[0] == 9 else "same")(h)  # type: ignore[no-any-return]

    def scaled(self, h: Tensor) -> Tensor:
        return h / h.shape[1]

    def same(self, h: Tensor) -> Tensor:
        return h


class FunctionOfTorch(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        function = F.softmax if x.shape[0] == 9 else F.leaky_relu
        return function(h, 1)


class OrValue(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return h * ((x.shape[0] == 9 and h.shape[1] ** -0.5) or 1.0)


class InList(Net):
    def hidden(self, h: Tensor, x: Tensor, kind: int = 0) -> Tensor:
        return h * [1.0, h.shape[1] ** -0.5][kind]


class InVariable(Net):
    def hidden(self, h: Tensor, x: Tensor, kind: int = 0) -> Tensor:
        scales = (1.0, 2.0, h.shape[1] ** -0.5)
        return h * scales[-kind]


class InDictionary(Net):
    def hidden(self, h: Tensor, x: Tensor, kind: str = "none") -> Tensor:
        return h / {"none": 1, "width": h.shape[1]}[kind]


class Smallest(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return h / min(h.shape[1], 2 * len(x))


class Largest(Net):
    def hidden(self, h: Tensor, x: Tensor, least: int = 100) -> Tensor:
        return h / max(h.shape[1], least)


class WidthOfLayer(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return h * self.a.out_features**-0.5 if x.shape[0] == 9 else h


class SizeReadBefore(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        _, width = h.shape
        scale = width**-0.5
        return h * scale if x.shape[0] == 9 else h


class SizeInAttribute(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        self.seen = h.shape[1]
        return h / self.seen if x.shape[0] == 9 else h


class FunctionOfFunction(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return by_length(h, x)


def by_length(h: Tensor, x: Tensor) -> Tensor:
    return scaled(h) if x.shape[0] == 9 else h


class Lambda(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return (lambda: h, lambda: h.softmax(1))[int(x.shape[0] == 9)]()


class NestedFunction(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        def other(h: Tensor) -> Tensor:
            return h / h.shape[1]

        return (torch.clone, other)[int(x.shape[0] == 9)](h)


class Repeated(Net):
    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        for _ in range(x.shape[0] - 8):
            h = h / h.shape[1]
        return h


def _train(model: nn.Module) -> Any:
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, InTraining):
            F_dropout, F.dropout = F.dropout, lambda x, *_: x
            try:
                return model.train()(TWO)
            finally:
                F.dropout = F_dropout
    return model.train()(TWO)


def _with_gradients(model: nn.Module) -> Any:
    with torch.enable_grad():
        return model(TWO.clone().requires_grad_())


def _scales(model: Any) -> Any:
    model.scales = True
    return model(TWO)


OTHER: dict[str, tuple[type[Net], Run]] = {
    "by batch": (ByBatch, lambda m: m(ONE)),
    "norm for batch 1": (NormOfOne, lambda m: m(ONE)),
    "early return": (EarlyReturn, lambda m: m(ONE)),
    "in training": (InTraining, _train),
    "grad mode": (WithGradients, _with_gradients),
    "inputs with gradients": (OfInputsWithGradients, _with_gradients),
    "by type": (ByType, lambda m: m.bfloat16()(TWO.bfloat16()).float()),
    "by argument": (ByArgument, lambda m: m(TWO, scale=True)),
    "by an extra tensor": (ByExtraTensor, lambda m: m(TWO, extra=torch.ones(2, 1))),
    "by attribute": (ByAttribute, _scales),
    "by value": (ByValue, lambda m: m(TWO + 500)),
    "where": (Where, lambda m: m(TWO + 500)),
    "gated": (Gated, lambda m: m(TWO + 500)),
    "by length": (ByLength, lambda m: m(TWO)),
    "helper": (Helper, lambda m: m(ONE)),
    "overwritten": (Overwritten, lambda m: m(ONE)),
    "arithmetic": (Arithmetic, lambda m: m(ONE)),
    "dispatch": (Dispatch, lambda m: m(ONE)),
    "match": (Match, lambda m: m(ONE)),
    "view": (View, lambda m: m(ONE)),
    "rolled": (Rolled, lambda m: m(NINE)),
    "part of the channels": (PartOfChannels, lambda m: m(NINE)),
    "halves swapped": (HalvesSwapped, lambda m: m(NINE)),
    "softmax by hand": (SoftmaxByHand, lambda m: m(NINE)),
    "function by name": (FunctionByName, lambda m: m(NINE)),
    "function of torch": (FunctionOfTorch, lambda m: m(NINE)),
    "value of and": (OrValue, lambda m: m(NINE)),
    "in a list": (InList, lambda m: m(TWO, kind=1)),
    "in a variable": (InVariable, lambda m: m(TWO, kind=1)),
    "in a dictionary": (InDictionary, lambda m: m(TWO, kind="width")),
    "smallest": (Smallest, lambda m: m(NINE)),
    "largest": (Largest, lambda m: m(TWO, least=1)),
    "width of a layer": (WidthOfLayer, lambda m: m(NINE)),
    "size read before": (SizeReadBefore, lambda m: m(NINE)),
    "size in an attribute": (SizeInAttribute, lambda m: m(NINE)),
    "function of a function": (FunctionOfFunction, lambda m: m(NINE)),
    "lambda": (Lambda, lambda m: m(NINE)),
    "nested function": (NestedFunction, lambda m: m(NINE)),
    "repeated": (Repeated, lambda m: m(NINE)),
}


def pruned(model: nn.Module, found: ChannelGroups, seed: int) -> tuple[nn.Module, nn.Module]:
    dead = drawn(found.groups, 0.5, torch.Generator().manual_seed(seed))
    masked, small = copy.deepcopy(model), copy.deepcopy(model)
    mask_units(masked, dead)
    apply_plan(small, found.plan(dead))
    return masked, small


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", OTHER)
def test_the_smaller_model_equals_the_masked_one_on_the_other_path(name: str) -> None:
    kind, run = OTHER[name]
    model = kind().eval()
    found = find_groups(model, TWO)
    assert ("c.weight", 0) in {axis for group in found.groups for axis in group.axes}, str(found)
    for seed in range(2):
        with torch.no_grad():
            masked, small = pruned(model, found, seed)
            torch.testing.assert_close(small(TWO), masked(TWO), atol=1e-5, rtol=1e-4)
            tolerance = 0.05 if name == "by type" else 1e-4
            torch.testing.assert_close(run(small), run(masked), atol=tolerance, rtol=tolerance)


class Chosen(Net):
    """A module without parameters that the example does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Identity(), nn.Softmax(1)])

    def hidden(self, h: Tensor, x: Tensor) -> Tensor:
        return self.ways[int(x.shape[0] == 9)](h)  # type: ignore[no-any-return]


def test_modules_that_no_run_calls_are_named() -> None:
    assert any("ways.1" in note for note in find_groups(Chosen().eval(), TWO).notes)


def test_code_without_a_readable_source_is_named() -> None:
    space: dict[str, Any] = {"Net": Net}
    exec("class Typed(Net):\n    def hidden(self, h, x):\n        return h / h.shape[1] if len(x) == 9 else h\n", space)
    assert any("Typed.hidden" in note for note in find_groups(space["Typed"]().eval(), TWO).notes)


class WritesFile(Net):
    folder = ""

    def hidden(self, h: Tensor, x: Tensor, folder: str = "") -> Tensor:
        if folder or self.scales:
            dumped(h, self.folder)
        return h


def dumped(h: Tensor, folder: str) -> None:
    with open(f"{folder}/written", "w") as file:
        file.write(str(h.shape[1] / 2))


def test_a_forced_branch_writes_no_file_and_is_reported(tmp_path: Path) -> None:
    model = WritesFile().eval()
    model.folder = str(tmp_path)
    found = find_groups(model, TWO)
    assert not list(tmp_path.iterdir())
    assert len(found.units) == 30
    assert any("not proved on 1 branches" in note and "folder or self.scales" in note for note in found.notes)


class Returns(Net):
    """A branch that returns hidden values: those that are left are compared."""

    def forward(self, x: Tensor, all_values: bool = False) -> Any:
        h = torch.relu(self.a(x))
        y = self.d(torch.relu(self.c(torch.relu(self.b(h)))))
        return self.both(y, h) if all_values else y

    def both(self, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return y, h


def test_a_branch_that_returns_hidden_values_spares_nothing() -> None:
    assert len(find_groups(Returns().eval(), TWO).units) == 30


class LayerForEachSample(nn.Module):
    """The example's two samples never reach the last layer, and a counter changes the output of every second call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer, _ in zip(self.layers, x, strict=False):
            x = layer(x)
        self.calls += 1
        return y + 0.5 * (self.calls % 2)


def test_another_batch_size_is_tried_for_a_model_with_state() -> None:
    model, three = LayerForEachSample().eval(), torch.randn(3, 6)
    found = find_groups(model, (TWO, TWO))
    with torch.no_grad():
        masked, small = pruned(model, found, 0)
        torch.testing.assert_close(small(three, three), masked(three, three))
