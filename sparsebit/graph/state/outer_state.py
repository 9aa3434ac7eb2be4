"""`OuterState`: state that a module's code and hooks keep outside of it: globals, class attributes, closures, defaults.

A graph cannot represent such state: a module whose call changes it must run its own code (`tracing/traced_calls.py`).
Comparisons use it to undo the effects of a run (`undisturbed_outer_state`). Places are found by following the names in
the code of functions (`names_in`, closures), without running them.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from sparsebit.graph.nodes.value_kinds import depends_on_input
from sparsebit.graph.state.state import (
    CONTAINERS,
    Undo,
    fingerprint,
    is_iterator,
    is_random_generator,
    kept_iterator,
    tensors_kept,
)
from sparsebit.graph.values.code import FOREIGN, MAX_FUNCTIONS, draws_unseeded, function_of, is_foreign, names_in
from sparsebit.graph.values.nested import tensors_of

_MAX_ITEMS = 256
_MISSING = object()
Kinds: TypeAlias = tuple[type, frozenset[type]]  # the class of a module, and those of the modules inside
_Followed: TypeAlias = tuple[types.FunctionType, list[dict[str, Any]]]  # a function, and where its names can be
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_CALLED_BY_TORCH = {"forward", "__call__", "__getattr__", "__getattribute__"}


@dataclass(frozen=True)
class Place:
    """A place where code can keep a value between calls."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


class OuterState:
    """Keeps the current values of all places that the code of some modules can reach."""

    def __init__(self, modules: Iterable[nn.Module], known: dict[Kinds, list[Place]]) -> None:
        """`known`: the places of classes that were examined before; a cache, which is filled."""
        self.undo: Undo = []
        places = dict.fromkeys(place for module in modules for place in _places_of(module, known))
        self.held = [(place, place.read()) for place in places]
        iterators = [(index, value) for index, (_, value) in enumerate(self.held) if is_iterator(value)]
        self.iterators = {index: kept_iterator(value) for index, value in iterators}
        self.fingerprints = [_fingerprint(value, self.undo) for _, value in self.held]

    def changed(self) -> str | None:
        """The name of a place whose value has changed; None if none has."""
        for (place, before), fingerprint_before in zip(self.held, self.fingerprints, strict=True):
            now = place.read()
            if _fingerprint(now, []) != fingerprint_before and not _is_memo(before, now, fingerprint_before):
                return place.name
        return None

    def restore(self) -> None:
        for index, (place, value) in enumerate(self.held):
            if place.read() is not value:
                place.write(value)
            elif index in self.iterators and _fingerprint(value, []) != self.fingerprints[index]:
                place.write(self.iterators[index])
        for undo in self.undo:
            undo()


@contextlib.contextmanager
def undisturbed_outer_state(*roots: nn.Module, known: dict[Kinds, list[Place]] | None = None) -> Iterator[None]:
    """Undo, at the end, changes that code of the roots' modules makes to such state. `known`: see `OuterState`."""
    modules = {id(module): module for root in roots for module in root.modules()}.values()
    state = OuterState(modules, {} if known is None else known)
    with tensors_kept(value for _, value in state.held):
        try:
            yield
        finally:
            state.restore()


def _fingerprint(value: Any, undo: Undo) -> Any:
    if isinstance(value, CONTAINERS) and len(value) > _MAX_ITEMS:
        return "container", id(value), len(value)
    return fingerprint(value, undo)


def _is_data(value: Any) -> bool:
    is_plain = value is None or isinstance(value, (bool, int, float, complex, str, torch.Tensor, *CONTAINERS))
    return is_plain or is_iterator(value) or is_random_generator(value)


def _is_memo(before: Any, now: Any, fingerprint_before: Any) -> bool:
    """Whether the change is a cache of tensors that do not depend on any input: a graph computes them at every call."""
    if before is None:
        return _is_fixed(now)
    if type(now) is not dict or now is not before or len(now) > _MAX_ITEMS or fingerprint_before[0] != "container":
        return False
    kept, items = fingerprint_before[-1], fingerprint(now, [])[-1]
    added = [value for item, value in zip(items, now.values(), strict=True) if item not in kept]
    return len(items) - len(added) == len(kept) and all(map(_is_fixed, added))


def _is_fixed(value: Any) -> bool:
    if isinstance(value, fx.Proxy):
        return not depends_on_input(value.node)
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (tuple, list)) and bool(value) and all(map(_is_fixed, value)) and bool(tensors_of(value))
    )


def _places_of(module: nn.Module, known: dict[Kinds, list[Place]]) -> list[Place]:
    kind = type(module)
    kinds = kind, frozenset(map(type, module.modules()))
    if kinds not in known:
        bases = [base for base in kind.__mro__ if not is_foreign(base)]
        own = [member for base in bases for member in vars(base).values()]
        attributes = (place for base in bases for place in _attributes(base))
        known[kinds] = [*_reached_by(own), *attributes, *_unseeded(module)]
    patched = [value for value in vars(module).values() if isinstance(value, (types.FunctionType, types.MethodType))]
    hooks = [hook for name in _HOOKS for hook in vars(module).get(name, {}).values()]
    if not patched and not hooks:
        return known[kinds]
    added = [*patched, *map(_code_of, hooks)]
    return [*known[kinds], *_reached_by(added), *_draws(_followed(added)), *filter(None, map(_owner, hooks))]


def _code_of(hook: Any) -> Any:
    """The function that a hook runs; for a callable object, the one of its class."""
    hook = hook.func if isinstance(hook, functools.partial) else hook
    return hook if function_of(hook) is not None else type(hook).__call__


def _owner(hook: Any) -> Place | None:
    """The object whose method the hook is, or that is called itself."""
    hook = hook.func if isinstance(hook, functools.partial) else hook
    owner = getattr(hook, "__self__", None if isinstance(hook, types.FunctionType) else hook)
    held = getattr(owner, "__dict__", None)
    if type(held) is not dict or isinstance(owner, nn.Module) or is_foreign(type(owner)):
        return None
    return Place(f"the {type(owner).__name__} of a hook", _constant(held), _ignore)


def _reached_by(members: list[Any]) -> Iterator[Place]:
    """The globals, closures and default arguments of functions, and of those that they call by name."""
    places = set[tuple[int, str]]()
    for function, spaces in _followed(members):
        for cell in function.__closure__ or ():
            if _is_data(_content(cell)) and (id(cell), "") not in places:
                places.add((id(cell), ""))
                yield _cell(cell, function)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if isinstance(default, CONTAINERS):
                yield Place(f"a default argument of {function.__qualname__}", _constant(default), _ignore)
        for namespace, name in ((space, name) for space in spaces for name in names_in(function.__code__)):
            value = namespace.get(name, _MISSING)
            if isinstance(value, type) and value.__module__ == function.__module__ and (id(value), "") not in places:
                places.add((id(value), ""))
                yield from _attributes(value)
            elif _is_data(value) and (id(namespace), name) not in places:
                places.add((id(namespace), name))
                yield _global(namespace, name)


def _unseeded(module: nn.Module) -> Iterator[Place]:
    """A place that always changes, if what `forward` calls draws numbers without a seed.

    It may call methods of the modules inside. Other methods are left out: those of transformers that load files reach
    such draws, and no forward calls them.
    """
    methods: dict[str, list[Any]] = {}
    for kind in dict.fromkeys(map(type, module.modules())):
        for base in kind.__mro__:
            for name, member in vars(base).items() if not is_foreign(base) else ():
                methods.setdefault(name, []).append(member)
    own = (vars(base) for base in type(module).__mro__ if not is_foreign(base))
    roots = [member for held in own for name, member in held.items() if name in _CALLED_BY_TORCH]
    return _draws(_followed(roots, methods))


def _draws(functions: Iterable[_Followed]) -> Iterator[Place]:
    sources = (draws_unseeded(function.__code__) for function, _ in functions)
    for source in filter(None, sources):
        yield Place(f"the numbers from {source}() (no seed)", object, _ignore)  # at every read another object


def _followed(members: list[Any], methods: Mapping[str, list[Any]] = types.MappingProxyType({})) -> Iterator[_Followed]:
    """The functions, those that they call by name, and so on, each with the namespaces that its names can be in.

    `methods`: by name, those that `self.name` or `self.child.name` can be.
    """
    waiting, seen = list(members), set[int]()
    while waiting and len(seen) < MAX_FUNCTIONS:
        function = function_of(waiting.pop())
        if function is None or id(function) in seen or is_foreign(function):
            continue
        seen.add(id(function))
        waiting.extend(_content(cell) for cell in function.__closure__ or ())
        names, spaces = names_in(function.__code__), [function.__globals__]
        waiting.extend(method for name in names.intersection(methods) for method in methods[name])
        for namespace, name in ((space, name) for space in spaces for name in names):
            value = namespace.get(name, _MISSING)  # read once: a trace in another thread may add and remove names
            waiting.append(value)
            is_of_user = isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] not in FOREIGN
            if is_of_user and all(vars(value) is not known for known in spaces):  # `helpers.step(x)`
                spaces.append(vars(value))
        yield function, spaces


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _MISSING


def _cell(cell: types.CellType, function: types.FunctionType) -> Place:
    name = function.__code__.co_freevars[(function.__closure__ or ()).index(cell)]
    write = functools.partial(setattr, cell, "cell_contents")
    return Place(f"the variable {name!r} around it", lambda: _content(cell), write)


def _global(namespace: dict[str, Any], name: str) -> Place:
    def write(value: Any) -> None:
        if value is _MISSING:
            namespace.pop(name, None)
        else:
            namespace[name] = value

    return Place(f"the global {name!r}", functools.partial(namespace.get, name, _MISSING), write)


def _attributes(kind: type) -> Iterator[Place]:
    for name, value in list(vars(kind).items()):
        if not name.startswith("__") and _is_data(value):
            read = functools.partial(vars(kind).get, name, _MISSING)
            yield Place(f"the class attribute {kind.__name__}.{name}", read, functools.partial(setattr, kind, name))


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _ignore(_: Any) -> None: ...
