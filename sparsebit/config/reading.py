"""Reads a path, mapping or YAML text as the plain values of a config, with the line of each key.

Files may be hostile or damaged: sizes are bounded before and after aliases are followed, tags are not executed, and
every failure is a ConfigError with its line. Values are not checked here; `section.from_dict` does that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

import yaml

from sparsebit.errors import ConfigError

KeyPath = tuple[str, ...]
Source = Union[str, "os.PathLike[str]", Mapping[str, Any]]

# Far above the size of real configs. A hostile file (huge, or with aliases that multiply) must not exhaust memory.
MAX_BYTES = 1 << 18
MAX_NODES = 100_000

_TOP_LEVEL_KEY = re.compile(r"^\s*(\{|[^\s:]+\s*:(\s|$))")


class Document(dict[str, Any]):
    """The values of one config and where they came from.

    `origin` is the file's name, or "" for a mapping or a text. `lines` holds the 1-based line of a key by its path
    without places in lists, `("W", "QUANTIZER", "BIT")` or `("W", "SPECIFIC", "layer1.*")`; a mapping has none.
    """

    def __init__(self, values: Mapping[str, Any], origin: str = "", lines: Mapping[KeyPath, int] | None = None) -> None:
        super().__init__(values)
        self.origin = origin
        self.lines = dict(lines or {})

    def line_of(self, path: KeyPath) -> int | None:
        """The line of the key, or of the nearest enclosing section that was written."""
        return next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), None)


def read(source: Source) -> Document:
    """The config's values, unchecked.

    A string is treated as YAML if it has several lines or starts with a key (`BACKEND: virtual`), else as a path.
    """
    if isinstance(source, Document):
        return source
    if isinstance(source, Mapping):
        return Document(_plain(source))
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"a config cannot be read from {type(source).__name__}; {_ALLOWED}")
    if isinstance(source, str) and ("\n" in source or (_TOP_LEVEL_KEY.match(source) and not os.path.exists(source))):
        return _parse(source, origin="")
    path = Path(source)
    return _parse(_text_of(path), origin=str(path))


_ALLOWED = "allowed: the path of a YAML file, a dict, YAML text such as 'BACKEND: virtual'"


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1).decode("utf-8-sig")
    except FileNotFoundError:
        fault = f"no config file at {str(path)!r} (looked from {os.getcwd()}); {_ALLOWED}"
    except UnicodeDecodeError as error:
        fault = f"{path}: not a text file in UTF-8 (byte {error.start}); is this the right file?"
    except (OSError, ValueError) as error:
        fault = f"the config file {str(path)!r} cannot be read: {error}"
    raise ConfigError(fault)


class _Loader(yaml.SafeLoader):
    """yaml.SafeLoader that also reads `1e-3` as a number, as YAML 1.2 does; 1.1 takes it for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _parse(text: str, origin: str) -> Document:
    where = f"{origin}: " if origin else ""
    if len(text.encode(errors="replace")) > MAX_BYTES:
        raise ConfigError(f"{where}a config has at most {MAX_BYTES:,} bytes; is this the right file?")
    lines: dict[KeyPath, int] = {}
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                raise ConfigError(f"{where}the config is empty; it needs at least W.QUANTIZER.BIT and A.QUANTIZER.BIT")
            _check_node(root, (), lines, {}, where)
            values = loader.construct_document(root)
        finally:
            loader.dispose()
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{where}not a config: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # a ValueError: a month 13, an integer of a million digits
        raise ConfigError(f"{where}not valid YAML: {_yaml_fault(error)}") from None
    if not isinstance(values, dict):
        kind = _KINDS.get(type(values), "not")
        raise ConfigError(f"{where}a config is a mapping of keys (BACKEND, W, A, ...), but this is {kind}")
    return Document(values, origin, lines)


_TEXT, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
_KINDS = {str: "text", list: "a list", int: "a number", float: "a number", bool: "true/false"}


def _check_node(
    node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], sizes: dict[int, int | None], where: str
) -> int:
    """Record the line of every key, raise for duplicate keys, and bound the size after aliases are followed."""
    if id(node) in sizes:
        size = sizes[id(node)]
        if size is None:
            raise ConfigError(f"{where}line {node.start_mark.line + 1}: an alias that contains itself is not a config")
        return size
    sizes[id(node)] = None
    size = 1
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            size += _check_node(item, path, lines, sizes, where)
    elif isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            # Lists, numbers, null, and in YAML 1.1 also on, off, yes, no.
            is_text = isinstance(key.value, str)
            if not is_text or key.tag not in (_TEXT, _MERGE):
                hint = f"; put {key.value or 'it'} in quotes" if is_text else ", not a list or a mapping"
                raise ConfigError(f"{where}line {line}: a key must be text{hint}")
            here = (*path, key.value)
            if key.value in first and key.tag != _MERGE:
                before = f"first on line {first[key.value]}"
                raise ConfigError(f"{where}line {line}: {'.'.join(here)} is given twice ({before}); keep one of them")
            first[key.value] = line
            lines.setdefault(here, line)
            size += _check_node(value, here, lines, sizes, where)
    if size > MAX_NODES:
        raise ConfigError(f"{where}the aliases unfold to more than {MAX_NODES:,} values; that is not a config")
    sizes[id(node)] = size
    return size


def _yaml_fault(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    hint = ""
    if "alias" in problem or "alias" in (getattr(error, "context", None) or ""):
        hint = '; a glob that starts with * must be quoted: "*.fc": [...]'
    elif "'\\t'" in problem:
        hint = "; indent with spaces, not tabs"
    elif "could not determine a constructor" in problem:
        hint = "; tags (!...) are not allowed, only plain values are"
    return place + problem + hint


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy made of dicts and lists only, so that later edits of the user's mapping have no effect here."""
    if depth > 32:
        raise ConfigError("the mapping is nested more than 32 deep; that is not a config")
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise ConfigError(f"a key must be text, but {odd[0]!r} is {type(odd[0]).__name__}")
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    return value
