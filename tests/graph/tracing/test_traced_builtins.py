from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from functools import partial, singledispatch
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.region import Region


class Asks(nn.Module):
    def __init__(self, question: Any) -> None:
        super().__init__()
        self.linear, self.question = nn.Linear(8, 8), question

    def forward(self, x: Any) -> Tensor:
        y = self.linear(x if self.question(x) else x["x"] if isinstance(x, dict) else x * 3)
        return y * 2 if isinstance(y, Tensor) and not isinstance(y, (tuple, nn.Parameter)) else y


@singledispatch
def dispatched(x: Any) -> bool:
    return False


@dispatched.register
def _(x: Tensor) -> bool:
    return True


QUESTIONS: dict[str, Any] = {
    "isinstance": lambda x: isinstance(x, Tensor),
    "isinstance of several": lambda x: isinstance(x, (list, Tensor)),
    "not a mapping": lambda x: not isinstance(x, Mapping),
    "type is": lambda x: type(x) is Tensor,
    "type ==": lambda x: type(x) == Tensor,  # noqa: E721
    "type in": lambda x: type(x) in (Tensor, nn.Parameter),
    "type name": lambda x: type(x).__name__ == "Tensor",
    "__class__": lambda x: x.__class__ is Tensor,
    "is_tensor": lambda x: torch.is_tensor(x),
    "hasattr": lambda x: hasattr(x, "shape") and not hasattr(x, "tensors"),
    "getattr": lambda x: getattr(x, "tensors", None) is None and getattr(x, "is_marked", 1) == 1,
    "callable": lambda x: not callable(x),
    "issubclass": lambda x: issubclass(type(x), Tensor),
    "singledispatch": dispatched,
    "dtype by class": lambda x: isinstance(x, (list, torch.FloatTensor)),
    "another dtype by class": lambda x: not isinstance(x, torch.DoubleTensor | torch.HalfTensor),
}


@pytest.mark.parametrize("with_example", [True, False], ids=["example", "no example"])
@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_about_the_class_of_an_input(name: str, with_example: bool) -> None:
    model, x = Asks(QUESTIONS[name]), torch.randn(4, 8)
    copy = capture(model, example=((x,), {}) if with_example else None)
    torch.testing.assert_close(copy.model(x), model(x))
    if copy.untraced:
        assert name == "singledispatch" or ("dtype" in name and not with_example)
    if "getattr" not in name:
        torch.testing.assert_close(copy.model(nn.Parameter(x)), model(nn.Parameter(x)))


def test_another_dtype_than_the_captured_one_runs_the_models_own_code() -> None:
    model, x = Asks(QUESTIONS["dtype by class"]).double(), torch.randn(4, 8).double()
    copy = capture(model, example=((x,), {}))
    torch.testing.assert_close(copy.model(x), model(x))
    copy.model.float(), model.float()
    torch.testing.assert_close(copy.model(x.float()), model(x.float()))


def test_another_class_than_the_captured_one_runs_the_models_own_code() -> None:
    model, x = Asks(QUESTIONS["isinstance"]), torch.randn(4, 8)
    copy = capture(model, example=((x,), {}))
    assert isinstance(copy.model, Region)
    torch.testing.assert_close(copy.model({"x": x}), model({"x": x}))


def test_an_attribute_that_a_call_adds_is_seen() -> None:
    model, x = Asks(lambda x: hasattr(x, "is_marked")), torch.randn(4, 8)
    copy = capture(model)
    torch.testing.assert_close(copy.model(x), model(x))
    x.is_marked = True  # type: ignore[attr-defined]
    torch.testing.assert_close(copy.model(x), model(x))


def test_subclasses_of_tensors_are_told_apart() -> None:
    class Boxes(Tensor):
        pass

    model, x = Asks(lambda x: not isinstance(x, Boxes)), torch.randn(4, 8)
    for example, other in ((x, x.as_subclass(Boxes)), (x.as_subclass(Boxes), x)):
        copy = capture(model, example=((example,), {}))
        for value in (example, other):
            torch.testing.assert_close(copy.model(value).as_subclass(Tensor), model(value).as_subclass(Tensor))


TRAINING: dict[str, Any] = {
    "== False": lambda m: m.training == False,  # noqa: E712
    "!= True": lambda m: m.training != True,  # noqa: E712
    "not": lambda m: not m.training,
    "int": lambda m: int(m.training) == 0,
    "index": lambda m: [True, False][m.training],
    "key": lambda m: {True: False, False: True}[m.training],
    "str": lambda m: f"{m.training}" == "False",
    "isinstance": lambda m: isinstance(m.training, bool) and not m.training,
    "or": lambda m: not (m.training | False),
}


class Trains(nn.Module):
    def __init__(self, is_eval: Any) -> None:
        super().__init__()
        self.linear, self.is_eval = nn.Linear(8, 8), is_eval

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.is_eval(self) else x * 5


class TrainsByIdentity(Trains):
    def forward(self, x: Tensor) -> Tensor:
        mode = self.training
        return self.linear(x) if mode is False else x * 5


@pytest.mark.parametrize("name", TRAINING)
def test_questions_about_training(name: str) -> None:
    model, x = Trains(TRAINING[name]).eval(), torch.randn(4, 8)
    copy = capture(model)
    torch.testing.assert_close(copy.model(x), model(x))
    assert list(copy.eval_branches) == [""] and not copy.untraced


def test_training_compared_by_identity() -> None:
    model, x = nn.Sequential(TrainsByIdentity(None)).eval(), torch.randn(4, 8)
    copy = capture(model)
    torch.testing.assert_close(copy.model(x), model(x))
    assert list(copy.eval_branches) == ["0"] and not copy.untraced


def test_models_that_are_captured_or_run_in_other_threads() -> None:
    """Nothing of a trace is seen by another thread, and nothing is left of it."""
    saved = {name: getattr(torch, name) for name in ("rand", "arange", "is_tensor", "is_grad_enabled", "no_grad")}
    faults: list[BaseException] = []
    stop = threading.Event()

    def runs() -> None:
        own = nn.Sequential(nn.Linear(8, 8), Asks(QUESTIONS["type is"]), nn.Dropout())
        try:
            while not stop.is_set():
                with torch.no_grad():
                    assert type(torch.rand(2)) is Tensor and own(torch.randn(2, 8)).shape == (2, 8)
                    assert list(own._modules) == ["0", "1", "2"]
        except BaseException as error:
            faults.append(error)

    def builds() -> None:
        try:
            for _ in range(4):
                copy = capture(nn.Sequential(Asks(QUESTIONS["isinstance"]), Trains(TRAINING["not"])))
                assert not copy.untraced and len(copy.model.graph_module.graph.nodes) < 20  # type: ignore[union-attr]
        except BaseException as error:
            faults.append(error)

    runner, builders = threading.Thread(target=runs), [threading.Thread(target=builds) for _ in range(3)]
    for thread in (runner, *builders):
        thread.start()
    for thread in builders:
        thread.join()
    stop.set()
    runner.join()
    assert not faults, faults
    assert saved == {name: getattr(torch, name) for name in saved}
    assert "isinstance" not in globals() and "type" not in globals()


def test_code_that_was_executed_from_a_string_gets_the_right_answers() -> None:
    scope: dict[str, Any] = {"nn": nn, "torch": torch}
    source = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) if isinstance(x, torch.Tensor) and type(x) is torch.Tensor else self.b(x)
"""
    exec(source, scope)
    model, x = scope["Net"](), torch.randn(2, 4)
    captured = capture(model)
    torch.testing.assert_close(captured.model(x), model(x), rtol=0, atol=0)
    assert not captured.untraced and not {"isinstance", "type"} & scope.keys()


def test_a_module_that_is_loaded_after_a_trace_gets_the_right_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 8)
    capture(Asks(QUESTIONS["isinstance"]))
    for name in ("first_helper", "second_helper"):  # the second takes the place of the first in sys.modules
        helper: Any = ModuleType(name)
        helper.__file__ = f"/{name}.py"
        exec("def is_of(kind, x):\n    return isinstance(x, kind)", vars(helper))
        with monkeypatch.context() as loaded:
            loaded.setitem(sys.modules, name, helper)
            model = Asks(partial(helper.is_of, Tensor))
            copy = capture(model)
        torch.testing.assert_close(copy.model(x), model(x))
        assert not copy.untraced and "isinstance" not in vars(helper)


def test_a_module_keeps_builtins_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    helper: Any = ModuleType("own_builtins")
    x = torch.randn(4, 8)
    helper.__file__ = "/own_builtins.py"
    own = vars(helper).setdefault("isinstance", lambda x, kind: True)
    exec("def answers(x):\n    return isinstance(x, str) and type(x).__name__ == 'Tensor'", vars(helper))
    monkeypatch.setitem(sys.modules, "own_builtins", helper)
    model = Asks(lambda x: helper.answers(x))
    copy = capture(model)
    torch.testing.assert_close(copy.model(x), model(x))
    assert not copy.untraced and vars(helper)["isinstance"] is own and "type" not in vars(helper)
