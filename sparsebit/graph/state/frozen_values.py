"""`FrozenValues`: notices when a plain value that a graph holds as a constant has changed since the trace.

A trace reads `self.temperature`, or a global, once; a later assignment would have no effect on the graph. `Region` asks
`changed()` at every call. So the cost per call must be small: only values that the traced code can read
(`code_reads.py`) are watched, and they are compared in groups, in C (`operator.attrgetter`).

Attributes of modules are watched by name, containers and plain objects by content, several levels deep.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import enum
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sparsebit.graph.state.code_reads import PLAIN, CodeReads, is_library, reads_of, reads_of_functions
from sparsebit.graph.values.code import is_foreign

_REGISTRIES = nn.Module().__dict__.keys()
_MAX_DEPTH = 4
_MAX_ITEMS = 1000
_MAX_BYTES = 4096
_CONTAINERS = (list, dict, set, collections.deque)
_RECORDS = (types.SimpleNamespace, argparse.Namespace)  # of Python itself, but they hold the user's values


@dataclass(frozen=True)
class _Group:
    """Values that are compared at once: `read(holder)` returned `held`, the values called `names`.

    `is_outside`: the holder does not belong to the model (a global, a class), so a copy of the model has the same one.
    """

    read: Callable[[Any], Any]
    holder: Any
    held: Any
    names: tuple[str, ...]
    is_outside: bool = False

    @property
    def is_changed(self) -> bool:
        with contextlib.suppress(Exception):  # deleted, or not comparable, as tensors are not
            value = self.read(self.holder)
            return not (value is self.held or value == self.held)
        return True


class FrozenValues:
    """The plain values that the code of some modules, by path, can read, as they are now.

    `new_names`: a list to which the names of attributes are added that modules did not have, when they are set.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], new_names: list[str] | None = None) -> None:
        self._groups: list[_Group] = []
        self._seen: set[int] = set()
        modules = list(modules)
        reads, size = CodeReads(), -1
        for _, module in modules:
            patched = [value for value in vars(module).values() if isinstance(value, types.FunctionType)]
            reads.update(reads_of(type(module)))
            reads.update(reads_of_functions(patched))
        while size != len(reads):  # objects that are found may have code (properties) that reads further values
            size, self._groups, self._seen = len(reads), [], set()
            for path, module in modules:
                self._watch_module(path, module, reads)
            self._watch_surroundings(reads)
        if new_names is not None:
            known = {*reads.strings, *reads.attributes}
            places = ("attributes that were missing",)
            self._groups.append(_Group(lambda given: [name for name in given if name in known], new_names, [], places))

    def _watch_surroundings(self, reads: CodeReads) -> None:
        """Globals, variables around functions, default arguments, attributes of classes."""
        for kind in list(reads.classes):
            names = [name for name in _data_of(kind) if reads.may_read(name)]
            for name in names if not issubclass(kind, enum.Enum) else ():
                read = operator.attrgetter(name)
                self._watch_outside(read, kind, f"the class attribute {kind.__name__}.{name}", reads)
        for cell, name in list(reads.cells.values()):
            self._watch_outside(_CONTENTS, cell, f"the variable {name!r} around the code", reads)
        for function in list(reads.with_defaults):
            place = f"the default arguments of {function.__qualname__}"
            self._watch_outside(_DEFAULTS, function, place, reads)
        for namespace, name in list(reads.globals.values()):
            if name in namespace:
                self._watch_outside(operator.itemgetter(name), namespace, f"the global {name}", reads)

    def changed(self) -> str | None:
        """A sentence on the first value that has changed; None if none has."""
        changed = next((group for group in self._groups if group.is_changed), None)
        return None if changed is None else _described(changed)

    def _watch_module(self, path: str, module: nn.Module, reads: CodeReads) -> None:
        here = f"{path}." if path else ""
        own = [name for name in vars(module) if name not in _REGISTRIES and not name.startswith("_tensor_constant")]
        of_class = [name for base in type(module).__mro__ if not is_foreign(base) for name in _data_of(base)]
        names = [name for name in own if reads.may_read(name)]
        self._watch_attributes(module, names, here)
        shared = [name for name in dict.fromkeys(of_class) if name not in vars(module) and reads.may_read(name)]
        if shared:  # read through the instance, as it may get a value of its own later
            read = operator.attrgetter(*shared)
            self._groups.append(_Group(read, module, read(module), tuple(f"{here}{name}" for name in shared)))
        for name in names:
            self._watch_inside(vars(module).get(name), f"{here}{name}", reads, 0)
        for name in shared:
            self._watch_inside(getattr(module, name), f"{here}{name}", reads, 0, is_outside=True)

    def _watch_attributes(self, holder: Any, names: list[str], here: str, *, is_outside: bool = False) -> None:
        if names:
            entries, attributes = operator.itemgetter(*names), operator.attrgetter(*names)
            # From `__dict__`, past a `__getattr__` or descriptor of the class, whose code must not run here.
            read = (lambda holder: entries(holder.__dict__)) if _has_dict(holder) else attributes
            places = tuple(f"{here}{name}" for name in names)
            self._groups.append(_Group(read, holder, read(holder), places, is_outside))

    def _watch_outside(self, read: Callable[[Any], Any], holder: Any, place: str, reads: CodeReads) -> None:
        """A value that does not belong to the model, and what it holds."""
        try:
            value = read(holder)
        except ValueError:  # a variable without a value
            return
        if isinstance(value, PLAIN):
            self._groups.append(_Group(read, holder, value, (place,), True))
        self._watch_inside(value, place, reads, 0, is_outside=True)

    def _watch_inside(self, value: Any, place: str, reads: CodeReads, depth: int, *, is_outside: bool = False) -> None:
        """Watch the contents of a container or a plain object, several levels deep.

        For a dictionary outside of the model, only its current entries are watched: code may keep its own results
        there.
        """
        if type(value).__module__ == "numpy" and getattr(value, "nbytes", _MAX_BYTES) < _MAX_BYTES:
            self._groups.append(_Group(_BYTES, value, value.tobytes(), (place,), is_outside))
        elif isinstance(value, torch.Tensor) and depth and not value.is_inference():
            self._groups.append(_Group(_version, value, value._version, (f"changes in place of {place}",), is_outside))
        simple = (nn.Module, torch.Tensor, type, *(kind for kind in PLAIN if kind is not tuple))
        if isinstance(value, simple) or id(value) in self._seen or depth > _MAX_DEPTH:
            return
        self._seen.add(id(value))
        if isinstance(value, (tuple, *_CONTAINERS)):
            if len(value) > _MAX_ITEMS:
                self._groups.append(_Group(len, value, len(value), (place,), is_outside))
                return
            if not isinstance(value, tuple):
                read = _reader_of(value, is_outside)
                self._groups.append(_Group(read, value, read(value), (place,), is_outside))
            for key, item in _items(value) if isinstance(value, dict) else enumerate(value):
                self._watch_inside(item, f"{place}[{key!r}]", reads, depth + 1, is_outside=is_outside)
        elif not is_foreign(type(value)) or isinstance(value, _RECORDS):
            if not is_library(type(value).__module__):
                reads.update(reads_of(type(value)))  # its properties read others
            slots = [name for base in type(value).__mro__ for name in _slots_of(base)]
            held = vars(value) if _has_dict(value) else [name for name in slots if hasattr(value, name)]
            names = [name for name in held if reads.may_read(name)]
            self._watch_attributes(value, names, f"{place}.", is_outside=is_outside)
            for name in names:
                inner = getattr(value, name, None)
                self._watch_inside(inner, f"{place}.{name}", reads, depth + 1, is_outside=is_outside)

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenValues:
        """The same for a copy of the modules, made with the same `memo`; changed values count as changed there, too."""
        new = FrozenValues(())
        new._groups = [group if group.is_outside else _copied(group, memo) for group in self._groups]
        return new

    def follow(self, original: FrozenValues) -> None:
        """For a copy whose functions were rebound to it: values that are unchanged in the original are unchanged here.

        Rebinding has replaced functions, which would otherwise count as a change.
        """
        for place, (group, theirs) in enumerate(zip(self._groups, original._groups, strict=True)):
            if not group.is_outside and not theirs.is_changed:
                self._groups[place] = replace(group, held=group.read(group.holder))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenValues, ((),)


def _copied(group: _Group, memo: dict[int, Any]) -> _Group:
    holder, held = copy.deepcopy((group.holder, group.held), memo)
    if group.read is _version and group.held == _version(group.holder):
        held = _version(holder)  # a copied tensor has its own version counter
    return _Group(group.read, holder, held, group.names)


def _reader_of(container: Any, is_outside: bool) -> Callable[[Any], Any]:
    """Reads the contents of a container; of a dictionary outside of the model, the entries that it has now."""
    if not isinstance(container, dict):
        return set if isinstance(container, set) else list
    keys = tuple(container)
    # With dict's own method, because a subclass's may create values.
    return (lambda held: [dict.__getitem__(held, key) for key in keys]) if is_outside else _items


def _has_dict(value: Any) -> bool:
    return type(getattr(value, "__dict__", None)) is dict


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)


_DEFAULTS = operator.attrgetter("__defaults__", "__kwdefaults__")
_CONTENTS = operator.attrgetter("cell_contents")
_BYTES = operator.methodcaller("tobytes")


def _version(tensor: torch.Tensor) -> int:
    return tensor._version


def _items(held: dict[Any, Any]) -> list[Any]:
    return list(dict.items(held))


def _data_of(kind: type) -> Iterator[str]:
    """The names of values, and of lists, dictionaries and plain objects, that a class holds for its instances."""
    for name, value in vars(kind).items():
        is_data = isinstance(value, (*_CONTAINERS, *_RECORDS, *PLAIN)) or _is_record(value)
        if not name.startswith("__") and is_data:
            yield name


def _is_record(value: Any) -> bool:
    """Whether it is an object of a user's class that holds data, not code or a descriptor."""
    kind = type(value)
    is_code = callable(value) or isinstance(value, (property, type)) or hasattr(kind, "__get__")
    return not is_code and not is_foreign(kind) and (_has_dict(value) or any(map(_slots_of, kind.__mro__)))


def _described(group: _Group) -> str:
    try:
        now = group.read(group.holder)
    except Exception:
        return f"{', '.join(group.names)}: a value that was captured is missing"
    before_and_now = (group.held, now) if len(group.names) > 1 else ([group.held], [now])
    for name, before, value in zip(group.names, *before_and_now, strict=True):
        if before is not value and not (isinstance(before, PLAIN) and before == value):
            return f"{name} = {before!r:.80} was captured, and it is {value!r:.80} now"
    return f"{', '.join(group.names)}: another value was captured"
