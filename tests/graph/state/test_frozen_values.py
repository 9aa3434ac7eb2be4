"""Plain values that a graph holds as constants act when they change, or the verb is refused."""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import pickle
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import CaptureError
from sparsebit.quantization.calibrating.model_state import require_captured_values
from tests.quantization.tiny import calibrated, qconfig

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
GAIN = 1.0


class Settings:
    def __init__(self) -> None:
        self.offset, self.inner = 0.0, {"slope": 1.0}


class Block(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.fc, self.settings, self.power = nn.Linear(8, 8), settings, 1

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) ** self.power * self.settings.inner["slope"]  # type: ignore[no-any-return]


class Net(nn.Module):
    shift = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()
        self.block = Block(self.settings)
        self.temperature, self.options, self.note = 1.0, {"scales": [1.0]}, "a"

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x) / self.temperature * self.options["scales"][0] * GAIN
        y = y + self.shift + self.settings.offset
        return y + self.late if hasattr(self, "late") else y  # type: ignore[no-any-return]


class Around(nn.Module):
    """Runs its own code around a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y if float(x.sum()) < 1e9 else y + 1


def _set(path: str, value: Any) -> Callable[[Any], None]:
    *owners, name = path.split(".")

    def change(net: Any) -> None:
        for owner in owners:
            net = getattr(net, owner)
        setattr(net, name, value)

    return change


CHANGES: dict[str, Callable[[Any], None]] = {
    "attribute": _set("temperature", 2.0),
    "nested module": _set("block.power", 2),
    "shared object": _set("block.settings.offset", 0.5),
    "class attribute": _set("shift", 0.5),
    "new attribute": _set("late", 0.5),
    "list entry": lambda net: net.options["scales"].__setitem__(0, 2.0),
    "dict entry": lambda net: net.settings.inner.update(slope=2.0),
    "another dict": _set("options", {"scales": [2.0]}),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("make", [Net, Around])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_changed_value_acts_and_is_not_saved(make: type[nn.Module], change: str, tmp_path: Path) -> None:
    model = make().eval()
    qmodel = calibrated(model, [X], qconfig(bits=16), example_inputs=(X,))
    before = model(X)
    for whole in (qmodel.model, model):
        CHANGES[change](whole.net if make is Around else whole)
    assert not torch.allclose(model(X), before, atol=1e-2)
    for copied in (qmodel, copy.deepcopy(qmodel)):
        torch.testing.assert_close(copied(X), model(X), rtol=0, atol=1e-2)
    for verb in (lambda: qmodel.save(tmp_path / "saved"), lambda: pickle.dumps(qmodel), qmodel.prepare_calibration):
        with pytest.raises(CaptureError, match=r"captured.*build the QuantModel again"):
            verb()


@pytest.fixture
def gain() -> Iterator[Callable[[float], None]]:
    def change(value: float) -> None:
        globals()["GAIN"] = value

    yield change
    change(1.0)


@torch.no_grad()
def test_a_changed_global_acts_and_is_named(gain: Callable[[float], None], caplog: pytest.LogCaptureFixture) -> None:
    model = Net().eval()
    qmodel = calibrated(model, [X], qconfig(bits=16), example_inputs=(X,))
    gain(2.0)
    torch.testing.assert_close(qmodel(X), model(X), rtol=0, atol=1e-2)
    assert "the global GAIN = 1.0 was captured, and it is 2.0 now" in caplog.text


@torch.no_grad()
def test_attributes_of_blocks_are_readable_and_values_that_no_code_reads_change_nothing() -> None:
    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.note, self.seen = nn.Linear(8, 8), "a", None

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] < 3:
                self.seen = x.shape  # which nothing reads
            y: Tensor = self.fc(x)
            return y

    qmodel = calibrated(Quiet().eval(), [X], example_inputs=(X,))
    qmodel.model.note = "b"
    qmodel(X[:2])
    assert qmodel.model.note == qmodel.source.note == "b" and qmodel.source.seen == (2, 8)
    assert qmodel.built.root is not None and qmodel.built.root.frozen_values is not None
    assert qmodel.built.root.frozen_values.changed() is None
    with pytest.raises(AttributeError):
        _ = qmodel.model.missing


def test_a_weight_that_is_set_on_a_block_is_the_one_that_is_read() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight, self.bias)

    model = nn.Sequential(Own(8, 8), nn.ReLU()).eval()
    qmodel = calibrated(model, [X], example_inputs=(X,))
    qmodel.model.get_submodule("0").weight = nn.Parameter(torch.zeros(8, 8))
    torch.testing.assert_close(qmodel(X[:1]), model[0].bias.relu()[None])


@dataclass(slots=True)
class Slots:
    gain: float = 1.0


class Private:
    limits: ClassVar[dict[str, float]] = {"gain": 1.0}

    def __init__(self) -> None:
        self._gain = 1.0

    @property
    def gain(self) -> float:
        return self._gain


@dataclass
class Holder:
    slots: Slots = field(default_factory=Slots)
    space: types.SimpleNamespace = field(default_factory=lambda: types.SimpleNamespace(gain=1.0))
    options: argparse.Namespace = field(default_factory=lambda: argparse.Namespace(gain=1.0))
    private: Private = field(default_factory=Private)
    pair: tuple[dict[str, float], ...] = field(default_factory=lambda: ({"gain": 1.0},))
    last: collections.deque[float] = field(default_factory=lambda: collections.deque([1.0]))
    flags: set[str] = field(default_factory=set)
    tensors: dict[str, Tensor] = field(default_factory=lambda: {"gain": torch.ones(1)})


def _decorated(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


OUTSIDE = types.SimpleNamespace(gain=1.0, table={"gain": 1.0})
READS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "slots": (lambda held: held.slots.gain, lambda held: setattr(held.slots, "gain", 2.0)),
    "namespace": (lambda held: held.space.gain, lambda held: setattr(held.space, "gain", 2.0)),
    "options": (lambda held: held.options.gain, lambda held: setattr(held.options, "gain", 2.0)),
    "property": (lambda held: held.private.gain, lambda held: setattr(held.private, "_gain", 2.0)),
    "class": (lambda held: Private.limits["gain"], lambda held: Private.limits.update(gain=2.0)),
    "tuple": (lambda held: held.pair[0]["gain"], lambda held: held.pair[0].update(gain=2.0)),
    "deque": (lambda held: held.last[-1], lambda held: held.last.append(2.0)),
    "set": (lambda held: 2.0 if "gain" in held.flags else 1.0, lambda held: held.flags.add("gain")),
    "tensor": (lambda held: held.tensors["gain"], lambda held: held.tensors["gain"].fill_(2.0)),
    "global object": (lambda held: OUTSIDE.gain, lambda held: setattr(OUTSIDE, "gain", 2.0)),
    "global table": (lambda held: OUTSIDE.table["gain"], lambda held: OUTSIDE.table.update(gain=2.0)),
}


@pytest.fixture
def unchanged_outside() -> Iterator[None]:
    yield
    OUTSIDE.gain = OUTSIDE.table["gain"] = Private.limits["gain"] = 1.0


@pytest.mark.usefixtures("unchanged_outside")
@pytest.mark.parametrize("name", READS)
@torch.no_grad()
def test_a_changed_value_inside_of_objects_acts(name: str) -> None:
    read, change = READS[name]

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.held = nn.Linear(8, 8), Holder()

        @_decorated
        def gain(self) -> Any:
            return read(self.held)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * self.gain()  # type: ignore[no-any-return]

    model = Reads().eval()
    qmodel = calibrated(model, [X], qconfig(bits=16), example_inputs=(X,))
    before = qmodel(X)
    copied = copy.deepcopy(qmodel)
    for held in {id(held): held for held in (model.held, qmodel.model.held, copied.model.held)}.values():
        change(held)
    for changed in (qmodel, copied):
        assert changed.built.root is not None and changed.built.root.frozen_values is not None
        assert changed.built.root.frozen_values.changed() is not None
        torch.testing.assert_close(changed(X), 2 * before, rtol=0, atol=1e-2)
        with pytest.raises(CaptureError, match=r"captured.*build the QuantModel again"):
            changed.prepare_calibration()


@torch.no_grad()
def test_values_that_the_code_keeps_by_itself_outside_are_no_change() -> None:
    masks: dict[int, float] = {}

    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            masks.setdefault(len(x), 1.0)
            return self.fc(x) * masks[len(x)]  # type: ignore[no-any-return]

    model = Caches().eval()
    model(X)
    qmodel = calibrated(model, [X], example_inputs=(X,))
    model(X[:2])
    qmodel.prepare_calibration()


class Patched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        forward = self.part.forward
        self.part.forward = lambda x: forward(x) * 2  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x)
        return y


def test_a_function_on_a_module_that_a_copy_has_anew_is_no_change() -> None:
    """A patched forward of a copy is another object, since it calls the copy's layers."""
    qmodel = calibrated(Patched().eval(), [X], qconfig(), example_inputs=(X,))
    copied = copy.deepcopy(qmodel)
    require_captured_values(copied, "save")
    assert torch.equal(copied(X), qmodel(X))
    qmodel.source.get_submodule("part").forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match=r"part\.forward"):
        require_captured_values(copy.deepcopy(qmodel), "save")
