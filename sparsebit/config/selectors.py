"""Globs on layer names: which layers a per-layer override (`SPECIFIC`) matches, and which override wins.

A layer matches by its module path and by the name of its torch.fx node, which the first Sparsebit's configs use. The
first matching override wins with all of its settings. Mixed-precision configs have thousands of overrides, hence the
index by literal part in `Selector` and the cache of spellings.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from sparsebit.config.config_errors import Fault, Faults

_SHORT = reprlib.Repr()
_WILD = re.compile(r"[*?\[]")
_CLASS_OR_WILD = re.compile(r"\[!?\]?[^\]]*\]|[*?\[]")
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
_NOT_IN_NAMES = re.compile(r"[^0-9a-z_*?\[\]]+")  # wild cards are kept: `name` may be a glob (`Selector.matching`)


@dataclass(frozen=True)
class Override:
    """One entry of `SPECIFIC`: its layers, and their settings.

    >>> Override("layer1.*", (("QUANTIZER.BIT", 4),)).to_entry()
    {'layer1.*': ['QUANTIZER.BIT', 4]}
    """

    glob: str
    settings: tuple[tuple[str, Any], ...]

    def to_entry(self) -> dict[str, list[Any]]:
        """The form in which it is written in a config file."""
        return {self.glob: [part for setting in self.settings for part in setting]}


def read_overrides(value: object) -> tuple[Override, ...]:
    """`[{glob: [KEY, value, KEY, value...]}]` -> overrides in the order written; keys upper-cased, values unchecked.

    >>> read_overrides([{"stem": ["QUANTIZER.BIT", 8], "head": ["QUANTIZER.BIT", 4]}])[1]
    Override(glob='head', settings=(('QUANTIZER.BIT', 4),))
    """
    entries = value if isinstance(value, (list, tuple)) else []
    read = [found for entry in entries for found in _read_entry(entry)]
    if entries is not value:
        read = [f"must be a list of mappings, {_FORM}, but is {_kind(value)}"]
    if reasons := [found for found in read if isinstance(found, str)]:
        raise Faults(Fault((), reason) for reason in reasons)
    return tuple(found for found in read if isinstance(found, Override))


_FORM = '[{"layer1.*": [QUANTIZER.BIT, 4]}]'


def _kind(value: object) -> str:
    known = {dict: "a mapping; put [ ] around it", type(None): "empty; take the key out"}
    return known.get(type(value)) or _SHORT.repr(value)


def _read_entry(entry: object) -> Iterator[Override | str]:
    """The overrides of one entry; a text describes an error."""
    if isinstance(entry, Override):
        yield entry
    elif not isinstance(entry, dict):
        yield f"each entry must be a mapping, {_FORM}, but one is {_kind(entry)}"
    for glob, settings in entry.items() if isinstance(entry, dict) else ():
        keys, values = (settings[::2], settings[1::2]) if isinstance(settings, (list, tuple)) else ((), ())
        if not isinstance(glob, str) or not glob:
            yield f"a glob must be text; put {glob!r} in quotes"
        elif not keys or len(keys) != len(values) or not all(isinstance(key, str) for key in keys):
            yield f"{glob!r} must have a list of keys and values in turn, {_FORM}, but has {_SHORT.repr(settings)}"
        elif len({key.upper() for key in keys}) < len(keys):
            yield f"{glob!r} sets a key twice: {', '.join(keys)}; keep one of them"
        else:
            yield Override(glob, tuple((key.upper(), value) for key, value in zip(keys, values, strict=True)))


def matches(glob: str, name: str) -> bool:
    """Whether `glob` selects the layer `name`; case-sensitive, `*` crosses dots.

    A layer matches by its module path and by the name of its torch.fx node, which the configs of the first
    Sparsebit use:

    >>> matches("patch_embed.proj", "patch_embed.proj"), matches("patch_embed_proj", "patch_embed.proj")
    (True, True)
    """
    spellings = _spellings(name)
    # Equality first: most globs of a mixed-precision config are plain names.
    return glob in spellings or (_WILD.search(glob) is not None and any(fnmatchcase(s, glob) for s in spellings))


def matches_any(globs: Iterable[str], name: str) -> bool:
    return any(matches(glob, name) for glob in globs)


class Selector:
    """Finds overrides by layer. The first that matches a layer applies, with all of its settings and no others.

    A look-up tries only globs whose longest literal part is in the name, so it takes no longer in a long list.

    >>> overrides = read_overrides([{"layer1.0": ["QUANTIZER.BIT", 8]}, {"layer1.*": ["QUANTIZER.BIT", 4]}])
    >>> Selector(overrides).first("layer1.0").settings, Selector(overrides).first("layer1.1").settings
    ((('QUANTIZER.BIT', 8),), (('QUANTIZER.BIT', 4),))
    """

    def __init__(self, overrides: Iterable[Override]) -> None:
        self.overrides = tuple(overrides)
        self._by_literal: dict[str, list[int]] = {}
        for index, override in enumerate(self.overrides):
            literal = max(_CLASS_OR_WILD.split(override.glob), key=len)
            self._by_literal.setdefault(literal, []).append(index)
        self._lengths = sorted({len(literal) for literal in self._by_literal})

    def matching(self, name: str) -> list[int]:
        """The places of all overrides that match a layer, in the order written.

        `name` may also be a glob out of the same list. It then means "all layers it matches" and is matched by every
        glob that covers them, itself included (`[ab]` does not match its own text, hence the comparison).
        """
        literals = {
            spelling[start : start + length]
            for spelling in _spellings(name)
            for length in self._lengths
            for start in range(len(spelling) - length + 1)
        }
        places = sorted(place for literal in literals for place in self._by_literal.get(literal, ()))
        globs = {place: self.overrides[place].glob for place in places}
        return [place for place, glob in globs.items() if glob == name or matches(glob, name)]

    def first(self, name: str) -> Override | None:
        """The override that applies to a layer; None if none matches."""
        found = self.matching(name)
        return self.overrides[found[0]] if found else None


def near_names(glob: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The names that the writer of a glob without a match may have meant, nearest first."""
    wanted = glob.strip("*").lower()
    known = {spelling.lower(): name for name in names for spelling in _spellings(name)}
    inside = [name for spelling, name in known.items() if wanted and wanted in spelling]
    close = [known[spelling] for spelling in difflib.get_close_matches(wanted, known, n=2 * count, cutoff=0.5)]
    return list(dict.fromkeys(close + inside))[:count]


@lru_cache(maxsize=4096)
def _spellings(name: str) -> tuple[str, str]:
    return name, node_name(name)


def node_name(path: str) -> str:
    """The torch.fx node name of a module.

    >>> node_name("layer1.0.conv1"), node_name("0.fc")
    ('layer1_0_conv1', '_0_fc')
    """
    node = _NOT_IN_NAMES.sub("_", _HUMP.sub("_", path).lower())
    return f"_{node}" if node[:1].isdigit() else node
