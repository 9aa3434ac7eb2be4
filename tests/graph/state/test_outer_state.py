"""Code that keeps state outside of its module runs as it is; tracing it leaves that state alone."""

from __future__ import annotations

import itertools
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from sparsebit.graph.capture import Captured, capture
from sparsebit.graph.state.outer_state import OuterState, undisturbed_outer_state

calls = 0
outputs: list[Any] = []
counts = {"calls": 0}
cache: dict[int, Any] = {}
table: Tensor | None = None


class Settings:
    calls = 0


class Part(nn.Module):
    calls = 0
    seen: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)


class OwnGlobal(Part):
    def forward(self, x: Tensor) -> Tensor:
        global calls
        calls += 1
        return self.fc(x) * (2 if calls > 3 else 1)


def count() -> int:
    counts["calls"] += 1
    return counts["calls"]


class Helper(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * count()


helpers: Any = types.ModuleType("helpers")
exec(
    """
calls = 0
def count():
    global calls
    calls += 1
    return calls
""",
    vars(helpers),
)


class HelperModule(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * helpers.count()


class GlobalOfAnotherModule(Part):
    def forward(self, x: Tensor) -> Tensor:
        helpers.calls += 1
        return self.fc(x) * helpers.calls


class Recurrent(Part):
    def forward(self, x: Tensor) -> Any:
        outputs.append(self.fc(x))
        return sum(outputs)


class OnClass(Part):
    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.fc(x) * type(self).calls


OnClass.calls = 0


class ClassList(Part):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return self.fc(x) * len(self.seen)


class OnAnotherClass(Part):
    def forward(self, x: Tensor) -> Tensor:
        Settings.calls += 1
        return self.fc(x) * Settings.calls


class Default(Part):
    def forward(self, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        seen.append(1)
        return self.fc(x) * len(seen)


class InMethod(Part):
    def scale(self) -> int:
        return count()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale()


class DataCache(Part):
    def forward(self, x: Tensor) -> Tensor:
        if 1 not in cache:
            cache[1] = x.mean()
        return self.fc(x) * cache[1]


def closure() -> nn.Module:
    number = 0

    class Closure(Part):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal number
            number += 1
            return self.fc(x) * number

    return Closure()


class Slotted:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


class WithSlots(Part):
    def __init__(self) -> None:
        super().__init__()
        self.state = Slotted()

    def forward(self, x: Tensor) -> Tensor:
        self.state.number += 1
        return self.fc(x) * self.state.number


def reset() -> None:
    global calls, table
    calls, table = 0, None
    helpers.calls = 0
    counts["calls"] = Part.calls = OnClass.calls = Settings.calls = 0
    outputs.clear(), cache.clear(), Part.seen.clear()  # type: ignore[func-returns-value]
    Default.forward.__defaults__[0].clear()  # type: ignore[index]


def opaque(captured: Captured) -> list[str]:
    return [failure.reason for failure in captured.untraced.values()]


numbers = itertools.cycle([1.0, 2.0, 3.0])


class GlobalIterator(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * next(numbers)


def test_the_position_of_a_global_iterator_is_state() -> None:
    global numbers
    numbers, model, x = itertools.cycle([1.0, 2.0, 3.0]), GlobalIterator(), torch.randn(2, 8)
    captured = capture(model, example=((x,), {}))
    assert opaque(captured) and next(numbers) == 1.0  # the example's run is undone
    assert not torch.allclose(captured.model(x), captured.model(x))


class Changing(dict[str, Any]):
    """Globals to which another thread adds a name whenever one is read, as a trace does."""

    def get(self, name: str, default: Any = None) -> Any:
        value = super().get(name, default)
        self[name] = value if name in self else isinstance
        return value


def test_names_that_a_trace_in_another_thread_adds_are_left_alone() -> None:
    names = Changing(torch=torch, total=1)
    code = compile("def forward(self, x):\n    return x * total if isinstance(x, torch.Tensor) else x", "", "exec")
    exec(code, names)
    kind = type("Racing", (nn.Module,), {"forward": types.FunctionType(names["forward"].__code__, names, "forward")})
    state = OuterState([kind()], {})
    assert [place.name for place, _ in state.held] == ["the global 'total'"]


STATEFUL: list[Callable[[], nn.Module]] = [
    OwnGlobal, Helper, HelperModule, GlobalOfAnotherModule, Recurrent, OnClass, ClassList, OnAnotherClass, Default,
    InMethod, DataCache, closure, WithSlots,
]  # fmt: skip


@pytest.mark.parametrize("build", STATEFUL)
@pytest.mark.parametrize("inside", [False, True], ids=["the model", "a part"])
@torch.no_grad()
def test_state_outside_of_a_module_is_kept_by_its_own_code(build: Callable[[], nn.Module], inside: bool) -> None:
    reset()
    batches = [torch.randn(4, 8) for _ in range(5)]
    part = build()
    model = nn.Sequential(nn.Linear(8, 8), part) if inside else part
    captured = capture(model)
    assert [reason for reason in opaque(captured) if "the next call may depend on this one" in reason]
    assert calls == helpers.calls == counts["calls"] == OnClass.calls == Settings.calls == 0
    assert not outputs and not cache and not Part.seen
    actual = [captured.model(x) for x in batches]
    if build is not closure:  # whose state the copy shares
        reset()
        for x, y in zip(batches, actual, strict=True):
            torch.testing.assert_close(y, model(x))
    else:
        assert not torch.allclose(actual[1], captured.model(batches[1]))


class Memo(Part):
    def forward(self, x: Tensor) -> Tensor:
        global table
        if table is None:
            table = torch.arange(8.0)
        if 8 not in cache:
            cache[8] = torch.ones(8) * self.fc.weight.sum()
        return self.fc(x) * table + cache[8]


@torch.no_grad()
def test_tensors_that_no_input_decides_may_be_kept_anywhere() -> None:
    reset()
    model, x = Memo(), torch.randn(4, 8)
    captured = capture(model)
    assert not captured.untraced and table is None and not cache
    torch.testing.assert_close(captured.model(x), model(x))


class Recorder:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def note(self, *_: Any) -> None:
        self.seen.append(1)

    __call__ = note


def note_globally(*_: Any) -> None:
    global calls
    calls += 1
    outputs.append(1)


@torch.no_grad()
def test_what_hooks_record_is_kept_too() -> None:
    reset()
    recorder, noted, model, x = Recorder(), [], nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    for hook in (recorder, recorder.note, note_globally, lambda *_: noted.append(1)):
        model[0].register_forward_hook(hook)
    with undisturbed_outer_state(model):
        model(x)
        assert (len(recorder.seen), len(noted), calls, len(outputs)) == (2, 1, 1, 1)
    assert (len(recorder.seen), len(noted), calls, len(outputs)) == (0, 0, 0, 0)
    capture(model, example=((x,), {}))  # runs the model on the example
    assert (len(recorder.seen), len(noted), calls, len(outputs)) == (0, 0, 0, 0)


@torch.no_grad()
def test_tensors_outside_of_a_module_are_put_back() -> None:
    reset()
    total = torch.zeros(8)

    class Sums(Part):
        def forward(self, x: Tensor) -> Tensor:
            total.add_(x.mean(0))
            return self.fc(x)

    model = Sums()
    with undisturbed_outer_state(model):
        model(torch.ones(4, 8))
        assert total.tolist() == [1.0] * 8
    assert total.tolist() == [0.0] * 8


class Makes(OrderedDict):  # type: ignore[type-arg]
    """Gives a new object of the class that it holds, as a table of activation functions does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class Loads(dict):  # type: ignore[type-arg]
    """Does work for whoever asks what it holds."""

    def items(self) -> Any:
        raise AssertionError("nobody may ask")

    keys = values = copy = items


MAKES = Makes(relu=nn.ReLU, gelu=nn.GELU)
LOADS = Loads(a=1)
QUEUE = deque([1, 2], maxlen=2)


class ReadsTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return MAKES["gelu"](self.linear(x)) * len(LOADS) * len(QUEUE)  # type: ignore[no-any-return]


class WritesTables(ReadsTables):
    def forward(self, x: Tensor) -> Tensor:
        MAKES.move_to_end("relu")
        MAKES["silu"] = nn.SiLU
        dict.__setitem__(LOADS, "b", 2)
        QUEUE.append(3)
        return super().forward(x)


@pytest.mark.parametrize("kind", [ReadsTables, WritesTables])
def test_tables_of_any_kind_are_left_as_they_are(kind: type[nn.Module]) -> None:
    x = torch.randn(2, 4)
    capture(kind().eval(), example=((x,), {}))
    capture(kind().eval())
    assert list(OrderedDict.items(MAKES)) == [("relu", nn.ReLU), ("gelu", nn.GELU)]
    assert list(dict.items(LOADS)) == [("a", 1)] and list(QUEUE) == [1, 2]
    assert isinstance(MAKES["relu"], nn.ReLU)
