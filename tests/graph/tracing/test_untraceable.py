"""Code that no graph can keep is recognised, runs as it is, and is reported."""

from __future__ import annotations

import collections
import itertools
import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.graph.capture import Captured, capture


class Doubled(torch.autograd.Function):
    """A backward that the forward does not tell."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -2 * gradient


bound_before = Doubled.apply


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


@torch.no_grad()
def frozen(x: Tensor) -> Tensor:
    return x * 2


def swallowing(x: Tensor) -> Tensor:
    try:
        return x * 2 if x.sum() > 0 else x * 3
    except Exception:
        return x * 5


def no_grad_block(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
    return x + y


def enable_grad_block(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x * 2


def set_grad_block(x: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        return x * 2


def autocast_block(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x.T).float() @ x


def saved_hooks(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return x.exp()


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + torch.rand(8)


UNKEEPABLE: dict[str, tuple[Any, str]] = {
    "autograd function": (lambda x: Doubled.apply(x), "Doubled"),
    "bound autograd function": (lambda x: bound_before(x), "Doubled"),
    "autograd function with setup_context": (lambda x: Cut.apply(x), "Cut"),
    "no_grad": (no_grad_block, "no_grad"),
    "no_grad decorator": (frozen, "no_grad"),
    "enable_grad": (enable_grad_block, "enable_grad"),
    "set_grad_enabled": (set_grad_block, "set_grad_enabled"),
    "inference_mode": (torch.inference_mode()(lambda x: (x * 2).clone()), "inference_mode"),
    "autocast": (autocast_block, "autocast"),
    "saved_tensors_hooks": (saved_hooks, "saved_tensors_hooks"),
    "is_grad_enabled": (lambda x: x * 2 if torch.is_grad_enabled() else x * 3, "is_grad_enabled"),
    "is_autocast_enabled": (lambda x: x * 2 if torch.is_autocast_enabled("cpu") else x * 3, "is_autocast_enabled"),
    "empty().normal_()": (lambda x: x + torch.empty(8).normal_(), "normal"),
    "zeros().bernoulli_()": (lambda x: x + torch.zeros(8).bernoulli_(0.5), "bernoulli"),
    "init": (lambda x: x + nn.init.uniform_(torch.empty(8)), "computes under torch.no_grad"),
    "dropout of a constant": (lambda x: x + F.dropout(torch.ones(8), 0.5, True), "random numbers"),
    "manual_seed": (seeded, "manual_seed"),
    "random": (lambda x: x * random.random(), "random generator"),
    "random.choice": (lambda x: random.choice([x, x * 2]), "random generator"),
    "numpy.random": (lambda x: x * float(np.random.rand()), "random generator"),
    "a swallowed question": (swallowing, "control flow"),
}  # fmt: skip


class Applies(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def captured(model: nn.Module, x: Tensor, with_example: bool) -> Captured:
    return capture(model, example=((x,), {}) if with_example else None)


@pytest.mark.sample(18)
@pytest.mark.parametrize("with_example", [True, False], ids=["example", "no example"])
@pytest.mark.parametrize("name", UNKEEPABLE)
def test_the_module_keeps_its_own_code(name: str, with_example: bool) -> None:
    function, word = UNKEEPABLE[name]
    model, x = nn.Sequential(nn.Linear(8, 8), Applies(function)), torch.randn(4, 8)
    copy = captured(model, x, with_example)
    assert list(copy.untraced) == ["1"] and word in copy.untraced["1"].reason
    for seed in range(3):
        outputs, gradients = [], []
        for module in (model, copy.model):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            outputs.append(module(x))
            if outputs[-1].requires_grad:
                gradients.append(torch.autograd.grad(outputs[-1].sum(), list(module.parameters()), allow_unused=True))
        torch.testing.assert_close(outputs[0], outputs[1])
        assert len(gradients) != 1
        for pair in zip(*gradients, strict=True):
            assert (pair[0] is None) == (pair[1] is None)
            torch.testing.assert_close(*pair)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.normal(0.0, 1.0, (8,)),
        lambda x: torch.bernoulli(torch.full((8,), 0.5)),
        lambda x: torch.rand_like(x),
        lambda x: torch.randn_like(torch.ones(8)),
        lambda x: torch.multinomial(torch.ones(8), 8).float(),
    ],
)
def test_random_functions_draw_at_every_call(draw: Any) -> None:
    model, x = Applies(lambda x: x + draw(x)), torch.randn(4, 8)
    copy = captured(model, x, with_example=True)
    assert not copy.untraced
    for seed in range(2):
        torch.manual_seed(seed)
        expected = model(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(copy.model(x), expected)


class Holder:
    def __init__(self) -> None:
        self.calls = 0


class Stateful(nn.Module):
    """`step(module, x)` reads and changes something that is kept from call to call."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(8, 8), step
        self.count, self.kept, self.previous = 0, torch.zeros(8), None
        self.names: list[float] = []
        self.table: dict[str, Any] = {"calls": 0}
        self.nested = {"deep": [collections.deque([1.0], maxlen=3)]}
        self.holder, self.numbers, self.order = Holder(), np.zeros(1), itertools.count()
        self.cycle, self.items = itertools.cycle([1.0, 2.0, 3.0]), [iter([1.0, 2.0, 3.0, 4.0, 5.0])]
        self.generator = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, self.linear(x))


def counts(module: Any, x: Tensor) -> Tensor:
    module.count += 1
    return x * module.count


def remembers(module: Any, x: Tensor) -> Tensor:
    y = x if module.previous is None else x + module.previous
    module.previous = x.detach()
    return y


def averages(module: Any, x: Tensor) -> Tensor:
    module.kept.mul_(0.5).add_(1)
    return x + module.kept


def appends(module: Any, x: Tensor) -> Tensor:
    module.names.append(1.0)
    return x * len(module.names)


def tables(module: Any, x: Tensor) -> Tensor:
    module.table["calls"] += 1
    return x * module.table["calls"]


def deep(module: Any, x: Tensor) -> Tensor:
    module.nested["deep"][0].append(2.0)
    return x * sum(module.nested["deep"][0])


def holds(module: Any, x: Tensor) -> Tensor:
    module.holder.calls += 1
    return x * module.holder.calls


def fills(module: Any, x: Tensor) -> Tensor:
    module.numbers += 1
    return x * float(module.numbers[0])


def replaces(module: Any, x: Tensor) -> Tensor:
    module.kept = module.kept + 1
    return x + module.kept


STEPS = [
    counts, remembers, averages, appends, tables, deep, holds, fills, replaces,
    lambda m, x: x * next(m.cycle), lambda m, x: x * next(m.items[0]),
    lambda m, x: x * next(m.order), lambda m, x: x * m.generator.random(),
]  # fmt: skip


@pytest.mark.parametrize("with_example", [True, False], ids=["example", "no example"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_state_in_plain_attributes_lives_on(step: Any, with_example: bool) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), Stateful(step)).eval(), torch.randn(4, 8)
    copy = captured(model, x, with_example)
    assert list(copy.untraced) == ["1"]
    with torch.no_grad():
        for _ in range(4):  # from the first call on: nothing of the example's run or of the trace is left
            torch.testing.assert_close(copy.model(x), model(x))


def test_a_parent_that_changes_its_childs_state_runs_its_own_code() -> None:
    class Child(nn.Module):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child, self.linear = Child(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.child.scale = self.child.scale + 1
            return self.child(self.linear(x))

    model, x = nn.Sequential(Parent()), torch.randn(2, 8)
    copy = captured(model, x, with_example=False)
    assert "0" in copy.untraced
    for _ in range(3):
        torch.testing.assert_close(copy.model(x), model(x))


def test_what_weights_alone_decide_may_be_kept_for_the_next_call() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(8))
            self.cache: dict[str, Tensor] = {}
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if "bias" not in self.cache:
                self.cache["bias"] = self.bias * 2
            if self.table is None:
                self.table = self.bias.exp()
            return x + self.cache["bias"] + self.table

    model, x = Cached(), torch.randn(2, 8)
    copy = captured(model, x, with_example=False)
    assert not copy.untraced and not copy.model.source.cache  # type: ignore[union-attr, operator]
    torch.testing.assert_close(copy.model(x), model(x))


outside = nn.Linear(8, 8)


class CallsOutside(nn.Module):
    """Its second layer is a global: no parameter of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return outside(self.linear(x))


class CallsUnregistered(CallsOutside):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Sequential(nn.Linear(8, 8))]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.linear(x))


@pytest.mark.parametrize("with_example", [True, False], ids=["example", "no example"])
def test_a_layer_outside_of_the_model_is_not_taken_into_the_copy(with_example: bool) -> None:
    model, x = nn.Sequential(CallsOutside()), torch.randn(2, 8)
    copy = captured(model, x, with_example)
    assert "not part of the model" in copy.untraced["0"].reason
    torch.testing.assert_close(copy.model(x), model(x))
    assert len(list(copy.model.parameters())) == 2
    unregistered = CallsUnregistered()
    copy = captured(unregistered, x, with_example)
    assert not copy.untraced  # the copy has a copy of it
    torch.testing.assert_close(copy.model(x), unregistered(x))
    theirs = {id(parameter) for parameter in unregistered.layers[0].parameters()}
    assert not theirs & {id(parameter) for parameter in copy.model.parameters()}


def test_parameters_used_by_another_way_stay_alive() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + sum(parameter.sum() for parameter in self.parameters())

    copy, x = captured(Sums(), torch.randn(2, 8), with_example=False), torch.randn(2, 8)
    assert "not read as an attribute" in copy.untraced[""].reason
    before = copy.model(x)
    with torch.no_grad():
        for parameter in copy.model.parameters():
            parameter.add_(1)
    assert not torch.equal(copy.model(x), before)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Calls:
    """Counts hooks by kind; `module` tells whose they are."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def note(cls, kind: str, result: Any = None) -> Any:
        def hook(*args: Any, **kwargs: Any) -> Any:
            cls.seen.append(kind)

        return hook


HOOKS: dict[str, Any] = {
    "forward": lambda m: m.register_forward_hook(Calls.note("forward")),
    "forward with kwargs": lambda m: m.register_forward_hook(Calls.note("forward"), with_kwargs=True),
    "always": lambda m: m.register_forward_hook(Calls.note("forward"), always_call=True),
    "pre": lambda m: m.register_forward_pre_hook(Calls.note("pre")),
    "backward": lambda m: m.register_full_backward_hook(Calls.note("backward")),
    "pre backward": lambda m: m.register_full_backward_pre_hook(Calls.note("backward")),
    "global": lambda m: nn.modules.module.register_module_forward_hook(Calls.note("forward")),
}


@pytest.mark.parametrize("is_root", [True, False])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_inner_modules_run_at_every_call(kind: str, is_root: bool) -> None:
    model = Inner() if is_root else nn.Sequential(nn.Linear(8, 8), Inner())
    x = torch.randn(4, 8, requires_grad=True)
    handle = HOOKS[kind](model if is_root else model[1])
    try:
        copy = captured(model, x, with_example=False)
        assert all("hooks" in failure.reason for failure in copy.untraced.values()) and copy.untraced
        Calls.seen.clear()
        model(x).sum().backward()
        expected = list(Calls.seen)
        for _ in range(2):
            Calls.seen.clear()
            copy.model(x).sum().backward()
            assert Calls.seen == expected and expected
    finally:
        handle.remove()


def test_a_trace_of_a_model_under_any_mode() -> None:
    """What is on around the build says nothing about the calls that follow."""
    model, x = nn.Sequential(nn.Linear(8, 8), Applies(no_grad_block)), torch.randn(4, 8)
    with torch.no_grad():
        assert "no_grad" in captured(model, x, with_example=False).untraced["1"].reason
    with torch.inference_mode():
        assert "no_grad" in captured(model, x, with_example=False).untraced["1"].reason


class Freezes(nn.Module):
    """One layer computes without gradients for its parameters, which train elsewhere."""

    def __init__(self, *, by_flag: bool) -> None:
        super().__init__()
        self.inner, self.weight, self.by_flag = nn.Sequential(nn.Linear(8, 8)), nn.Parameter(torch.randn(8, 8)), by_flag

    def forward(self, x: Tensor) -> Tensor:
        self._let_train(False)
        y = self.inner(x) @ self.weight
        self._let_train(True)
        return y

    def _let_train(self, wanted: bool) -> None:
        if self.by_flag:
            self.weight.requires_grad = wanted
        else:
            self.inner.requires_grad_(wanted)


@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize("by_flag", [False, True])
def test_parameters_that_forward_freezes(by_flag: bool, with_example: bool) -> None:
    model, x = Freezes(by_flag=by_flag), torch.randn(4, 8)
    copy = captured(model, x, with_example=with_example)
    assert "requires_grad" in copy.untraced[""].reason
    for run in (model, copy.model):
        assert all(parameter.requires_grad for parameter in run.parameters())
        run(x).sum().backward()
    gradients = [[p.grad is None for p in run.parameters()] for run in (model, copy.model)]
    assert gradients[0] == gradients[1] and any(gradients[0]) and not all(gradients[0])
