"""A registry of names: case-insensitive, without duplicates; the error for an unknown name lists the nearest ones."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from sparsebit.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """A dictionary that users extend.

    >>> OBSERVERS = Registry("observer")
    >>> @OBSERVERS.register("half_range", aliases=("half",))
    ... class HalfRange: ...
    >>> OBSERVERS.get("HALF_RANGE") is HalfRange
    True
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._aliases: dict[str, str] = {}
        self._options: dict[str, type[Any]] = {}

    def register(
        self, name: str, *, aliases: tuple[str, ...] = (), replace: bool = False, options: type[Any] | None = None
    ) -> Callable[[T], T]:
        """A decorator that registers its object under `name`; a second one under the same name needs `replace=True`.

        `options`: the class of its options in configs (`options_of`).
        """

        def file(entry: T) -> T:
            for key in (name, *aliases):
                if key.lower() in self and not replace and self.get(key) is not entry:
                    taken = f"{self.kind} {key!r} is already registered as {self.get(key)!r}"
                    raise ConfigError(f"{taken}; choose another name, or pass replace=True to take its place")
            key = name.lower()
            self._aliases.pop(key, None)
            if options is not None:
                self._options[key] = options
            elif self._entries.get(key) not in _bases(entry):
                self._options.pop(key, None)  # the options of the replaced entry
            self._entries[key] = entry
            self._aliases.update({alias.lower(): name.lower() for alias in aliases})
            return entry

        return file

    def canonical(self, name: str) -> str:
        """The canonical spelling of `name`: lower case, aliases resolved; raises for an unknown one."""
        key = self._aliases.get(name.lower(), name.lower())
        if key not in self._entries:
            near = difflib.get_close_matches(key, [*self._entries, *self._aliases], n=3)
            hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
            raise ConfigError(f"unknown {self.kind} {name!r}; allowed: {', '.join(self.names())}{hint}")
        return key

    def get(self, name: str) -> T:
        return self._entries[self.canonical(name)]

    def options_of(self, name: str) -> tuple[str, type[Any] | None]:
        """The class of the options that `name` takes, and the name that they were registered with; None: it takes none.

        A class that was registered without options inherits those of its base class, under that class's name.
        """
        key = self.canonical(name)
        entry = self._entries[key]
        owners = [key, *(other for base in _bases(entry) for other in self.names() if self._entries[other] is base)]
        return next(((owner, self._options[owner]) for owner in owners if owner in self._options), (key, None))

    def own_options(self) -> dict[str, type[Any]]:
        """By name, the classes of options that were registered."""
        return {name: options for name, options in sorted(self._options.items()) if name in self._entries}

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name.lower() in self._entries or name.lower() in self._aliases)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


def _bases(entry: object) -> tuple[type, ...]:
    return entry.__mro__ if isinstance(entry, type) else ()


def own_type(kind: type) -> str:
    """The `TYPE` of a class, for decorators without a name."""
    name = vars(kind).get("TYPE")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{kind.__name__} is registered without a name: write @register_...(name), or set its TYPE")
    return name


# The registries that a config's names are checked against; the methods' packages fill them.
OBSERVERS: Registry[object] = Registry("observer")
QUANTIZERS: Registry[object] = Registry("quantizer")
ALGORITHMS: Registry[object] = Registry("algorithm")
