"""`ModuleState`: the plain attributes of a module as state: what they hold, whether it changed, and how to restore it.

A graph cannot represent a counter, a list or a tensor that `forward` keeps as an attribute: a module whose call changes
one must run its own code. `ModuleState` takes a fingerprint of every attribute and of everything mutable inside of it,
several levels deep, and collects for each mutable object a function that puts its content back (`Undo`).

The user's objects may have any code in their methods, so containers are read and written with the methods of Python's
own classes (`_base`), and nothing is compared by `==` but fingerprints.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import torch
from torch import fx, nn

from sparsebit.graph.nodes.value_kinds import depends_on_input
from sparsebit.graph.state.training_flag import TrainingFlag

# Every module's registries, of tensors, children and hooks.
_REGISTRIES = nn.Module().__dict__.keys() - {"training"}
# Hooks are restored together with attributes: code may add a hook at its first call and note that in an attribute.
_HOOKS = [name for name, value in nn.Module().__dict__.items() if "_hooks" in name and isinstance(value, dict)]
CONTAINERS = (list, dict, set, collections.deque)
_CODE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
_WHOLE = (nn.Module, fx.Proxy, fx.Graph, TrainingFlag, *_CODE)  # not looked into
_MAX_ITEMS = 10_000
_MAX_DEPTH = 6
Undo = list[Callable[[], Any]]


class ModuleState:
    """The attributes of one module and everything mutable that they hold, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = {name: kept_iterator(value) for name, value in module.__dict__.items()}
        self.registries = {name: dict(module.__dict__[name]) for name in ("_parameters", "_buffers")}
        self.hooks = {name: dict(module.__dict__[name]) for name in _HOOKS}
        self.children = dict(module._modules)
        self.undo: Undo = []
        self.fingerprints = _fingerprints(module, self.undo)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Those in plain attributes: neither parameters nor buffers."""
        for name, value in self.attributes.items():
            if name not in _REGISTRIES:
                yield from tensors_inside(value)

    def changed(self) -> str | None:
        """The name of an attribute whose value has changed; None if none has."""
        now = _fingerprints(self.module, [])
        for name in {**self.fingerprints, **now}:
            if self.fingerprints.get(name) != now.get(name) and not self._is_memo(name):
                return name
        for registry, held in self.registries.items():
            for name, value in self.module.__dict__[registry].items():
                if held.get(name) is not value and not isinstance(value, fx.Proxy):
                    return str(name)
        # New children do not count: a trace installs modules that forward creates.
        now = self.module._modules
        return next((name for name, child in self.children.items() if now.get(name) is not child), None)

    def changes(self) -> list[str]:
        """The names of all attributes but `training` whose values have changed."""
        now = _fingerprints(self.module, [])
        names = {**self.fingerprints, **now}.keys() - {"training"}
        return sorted(name for name in names if self.fingerprints.get(name) != now.get(name))

    def restore(self) -> None:
        """Put everything back, except for tensor constants, which a trace stores at the module."""
        constants = {k: v for k, v in self.module.__dict__.items() if k.startswith("_tensor_constant")}
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes, **constants)
        for registry, held in {**self.registries, **self.hooks}.items():
            self.module.__dict__[registry].clear()
            self.module.__dict__[registry].update(held)
        self.module._modules.update(self.children)
        for undo in self.undo:
            undo()

    def _is_memo(self, name: str) -> bool:
        """Whether a change is a cache of values that depend on weights only: a graph computes them at every call."""
        value, fingerprint_before = self.module.__dict__.get(name), self.fingerprints.get(name)
        if isinstance(value, fx.Proxy):
            return fingerprint_before == _NOTHING and not depends_on_input(value.node)
        if (
            type(value) is not dict
            or fingerprint_before is None
            or fingerprint_before[:3] != ("container", dict, id(value))
        ):
            return False
        items = _items(value, [], set(), _MAX_DEPTH - 1)
        added = [item for item in items if item not in fingerprint_before[3]]
        fresh = [v for v in value.values() if isinstance(v, fx.Proxy) and not depends_on_input(v.node)]
        return len(items) - len(added) == len(fingerprint_before[3]) and len(added) == len(fresh)


_NOTHING = ("value", type(None), "None")


@contextlib.contextmanager
def undisturbed_state(root: nn.Module) -> Iterator[None]:
    """Undo, at the end of the block, changes to attributes of `root`'s modules, and to lists and dictionaries there."""
    states = states_of(root)
    try:
        yield
    finally:
        for state in states:
            state.restore()


@contextlib.contextmanager
def tensors_kept(held: Iterable[Any]) -> Iterator[None]:
    """Undo, at the end of the block, writes into tensors in `held`."""
    tensors = [tensor for value in held for tensor in tensors_inside(value)]
    kept = [(tensor, _version(tensor), tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, values in kept:
                if _version(tensor) != version:
                    tensor.copy_(values)


def tensors_inside(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors that a value holds. Unlike `tensors_of` it creates no objects, so the value may be anything."""
    if isinstance(value, torch.Tensor):
        yield value
    elif value is None or isinstance(value, (bool, int, float, str)) or _is_constant(value):
        return
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and depth < _MAX_DEPTH:
        for field in dataclasses.fields(value):
            yield from tensors_inside(getattr(value, field.name, None), depth + 1)
    elif isinstance(value, (tuple, *CONTAINERS)) and depth < _MAX_DEPTH:
        items = list(value) if isinstance(value, tuple) else _held(value)
        for item in items[:_MAX_ITEMS]:
            yield from tensors_inside(item, depth + 1)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def states_of(root: nn.Module, *, inside: bool = True) -> list[ModuleState]:
    """The state of `root` and, by default, of every module inside; not of ScriptModules, which keep it elsewhere."""
    modules = root.modules() if inside else [root]
    return [ModuleState(module) for module in modules if not isinstance(module, torch.jit.ScriptModule)]


class RequiredGradients:
    """Remembers which tensors require a gradient, to notice and undo that code changes it."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._before = {id(tensor): (tensor, tensor.requires_grad) for tensor in tensors}

    def has_changed(self, tensor: torch.Tensor) -> bool:
        _, before = self._before.get(id(tensor), (tensor, tensor.requires_grad))
        return tensor.requires_grad != before

    def restore(self) -> None:
        for tensor, before in self._before.values():
            if tensor.requires_grad != before:
                tensor.requires_grad_(before)


class PythonRandomness:
    """The state of Python's and NumPy's global random generators."""

    def __init__(self) -> None:
        numpy = sys.modules.get("numpy")
        self.python, self.numpy = random.getstate(), numpy.random.get_state() if numpy else None

    def has_changed(self) -> bool:
        now = PythonRandomness()
        return now.python != self.python or _numpy_fingerprint(now.numpy) != _numpy_fingerprint(self.numpy)

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


def fingerprint(value: Any, undo: Undo) -> Any:
    """A comparable value that differs after a change of `value`, two levels deep; functions to undo go to `undo`."""
    return _fingerprint(value, undo, set(), _MAX_DEPTH - 1)


def _numpy_fingerprint(state: Any) -> Any:
    return state if state is None else (state[0], state[1].tobytes(), *state[2:])


def _fingerprints(module: nn.Module, undo: Undo) -> dict[str, Any]:
    seen: set[int] = {id(module)}
    return {
        name: _fingerprint(value, undo, seen, 0)
        for name, value in module.__dict__.items()
        if name not in _REGISTRIES and not name.startswith("_tensor_constant")
    }


def _fingerprint(value: Any, undo: Undo, seen: set[int], depth: int) -> Any:
    """A comparable value that differs after a change of `value`, or of anything that it holds."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, enum.Enum)):
        return "value", type(value), repr(value)
    if isinstance(value, torch.Tensor):
        return "tensor", id(value), _version(value)
    # By identity: modules have a state of their own, code cannot change, and objects in `seen` may contain each other.
    if isinstance(value, _WHOLE) or id(value) in seen or depth > _MAX_DEPTH or _is_constant(value):
        return "object", id(value)
    if isinstance(value, (tuple, frozenset)):
        return "value", type(value), tuple(_fingerprint(item, undo, seen, depth + 1) for item in value)
    if is_iterator(value):
        return "value", type(value), _position(value)
    seen.add(id(value))
    if isinstance(value, CONTAINERS):
        undo.append(_undo_of(value))
        size = _base(value).__len__(value)
        items = _items(value, undo, seen, depth) if size <= _MAX_ITEMS else size
        return "container", type(value), id(value), items
    return "object", id(value), _inside(value, undo, seen, depth)


def _is_constant(value: Any) -> bool:
    """Whether its class is a frozen one of Sparsebit: configs, number formats. Each quantizer holds several."""
    kind: Any = type(value)
    if not str(kind.__module__).startswith("sparsebit."):
        return False
    parameters = getattr(kind, "__dataclass_params__", None)
    return bool(getattr(kind, "model_config", {}).get("frozen") if parameters is None else parameters.frozen)


def is_random_generator(value: Any) -> bool:
    """Whether it is a generator object of Python, NumPy or torch, whose state `fingerprint` reads."""
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (random.Random, torch.Generator, *kinds))


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator of Python's own, whose position a call of `next` moves. Generators cannot be copied."""
    return type(value).__module__ in ("builtins", "itertools") and hasattr(value, "__next__") and _can_be_made(value)


def kept_iterator(value: Any) -> Any:
    """A copy of an iterator at its current position, since an iterator cannot be set back; other values unchanged."""
    if not is_iterator(value):
        return value
    make, args, *state = value.__reduce__()
    made = make(*map(kept_iterator, args))
    if state and state[0] is not None:
        made.__setstate__(_kept_state(state[0]))
    return made


def _kept_state(state: Any) -> Any:
    """A copy of an iterator's state, with the iterators inside, and the list in which `cycle` collects its items."""
    if isinstance(state, tuple):
        return tuple(map(_kept_state, state))
    return list(state) if type(state) is list else kept_iterator(state)


def _position(value: Any) -> Any:
    """An iterator's position and the length of what it iterates over, which may shrink or grow."""
    if is_iterator(value):
        return type(value), _position(value.__reduce__()[1:])
    if isinstance(value, tuple):
        return tuple(map(_position, value))
    return repr(value) if isinstance(value, (int, float)) else len(value) if isinstance(value, Sized) else id(value)


def _can_be_made(value: Any) -> bool:
    try:
        return isinstance(value.__reduce__(), tuple)
    except TypeError:
        return False


def _items(value: Any, undo: Undo, seen: set[int], depth: int) -> tuple[Any, ...]:
    def printed(item: Any) -> Any:
        return _fingerprint(item, undo, seen, depth + 1)

    if isinstance(value, dict):
        return tuple((printed(key), printed(item)) for key, item in _held(value))
    return tuple(map(printed, _held(value)))


def _inside(value: Any, undo: Undo, seen: set[int], depth: int) -> Any:
    """The fingerprint of an object's contents: of a random generator, an array, or its attributes; None otherwise."""
    if isinstance(value, random.Random):
        state = value.getstate()
        undo.append(lambda: value.setstate(state))
        return state
    if isinstance(value, torch.Generator):
        drawn = value.get_state()
        undo.append(lambda: value.set_state(drawn))
        return drawn.numpy().tobytes()
    if (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(value, numpy.ndarray):
            kept = value.copy()
            undo.append(lambda: numpy.copyto(value, kept))
            return value.shape, value.tobytes()
        if isinstance(value, numpy.random.Generator):
            bits = value.bit_generator.state
            undo.append(lambda: setattr(value.bit_generator, "state", bits))
            return str(bits)
        if isinstance(value, numpy.random.RandomState):
            legacy = value.get_state()
            undo.append(lambda: value.set_state(legacy))
            return _numpy_fingerprint(legacy)
    held = getattr(value, "__dict__", None)
    slots = _slots(value)
    if slots:
        undo.append(lambda: _fill(value, slots))
        return tuple((name, _fingerprint(item, undo, seen, depth + 1)) for name, item in slots.items())
    return _fingerprint(held, undo, seen, depth + 1) if isinstance(held, dict) else None


def _slots(value: Any) -> dict[str, Any]:
    """The attribute values of an object of a class with `__slots__`."""
    lists = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for listed in lists for name in ((listed,) if isinstance(listed, str) else listed)]
    return {name: getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)}


def _fill(value: Any, slots: dict[str, Any]) -> None:
    for name, item in slots.items():
        if getattr(value, name, None) is not item:
            object.__setattr__(value, name, item)


def _base(container: Any) -> Any:
    """The built-in class of a container, whose methods read and write the items themselves.

    Methods of a subclass may run any code: create objects from the items, or import modules.
    """
    return next(kind for kind in (collections.OrderedDict, *CONTAINERS) if isinstance(container, kind))


def _held(container: Any) -> list[Any]:
    """The items of a container, pairs of a dictionary."""
    base = _base(container)
    return list(base.items(container) if isinstance(container, dict) else base.__iter__(container))


def _undo_of(container: Any) -> Callable[[], None]:
    base = _base(container)
    kept = [(item[0], kept_iterator(item[1])) if base is dict else kept_iterator(item) for item in _held(container)]

    def undo() -> None:
        now = _held(container)
        if len(now) == len(kept) and all(_is_same(one, other) for one, other in zip(now, kept, strict=True)):
            return
        base.clear(container)
        if isinstance(container, dict):
            for key, item in kept:
                base.__setitem__(container, key, item)
        else:
            (base.update if isinstance(container, set) else base.extend)(container, kept)

    return undo


def _is_same(one: Any, other: Any) -> bool:
    is_pair = type(one) is tuple and type(other) is tuple and len(one) == len(other) == 2
    return one is other or (is_pair and one[0] is other[0] and one[1] is other[1])
