"""Turns bits by layer into a config: the most common bits as the general rule, the others by glob."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from sparsebit.config.schema import QuantConfig
from sparsebit.config.tensor_config import Kind

Bits = Mapping[str, int]
Settings = tuple[tuple[str, Any], ...]
_BIT = "QUANTIZER.BIT"


def with_bits(config: QuantConfig, layers: Iterable[str], weights: Bits, activations: Bits) -> QuantConfig:
    """The config with these bits for the weights and activations of these layers; everything else is unchanged.

    `layers`: all names that a glob may match. Other settings of a layer in `SPECIFIC` are repeated, since only the
    first matching glob applies.
    """
    names = list(layers)
    wanted: dict[Kind, Bits] = {"W": weights, "A": activations}
    for kind, bits in wanted.items():
        changed = _with_bits(config, kind, names, bits, merge=True)
        if any(count != changed.resolve(kind, layer).QUANTIZER.BIT for layer, count in bits.items()):
            # A glob may also match a layer by its torch.fx name (`a_0`): then each layer gets an entry of its own.
            changed = _with_bits(config, kind, names, bits, merge=False)
        assert all(count == changed.resolve(kind, layer).QUANTIZER.BIT for layer, count in bits.items()), kind
        config = changed
    return config


def _with_bits(config: QuantConfig, kind: Kind, names: list[str], bits: Bits, *, merge: bool) -> QuantConfig:
    if not bits:
        return config
    winners = {name: config.winner(kind, name) for name in dict.fromkeys([*names, *bits])}
    plain = Counter(count for name, count in bits.items())
    common = max(plain, key=lambda count: (plain[count], count))
    fixed: dict[str, Settings] = {}  # required settings of each layer that a glob could match
    for name, winner in winners.items():
        settings = () if winner is None else tuple(pair for pair in winner.settings if pair[0] != _BIT)
        if name in bits:
            fixed[name] = (*settings, (_BIT, bits[name]))
        elif winner is not None:
            fixed[name] = winner.settings
    changed = config.replace(f"{kind}.QUANTIZER.BIT", common)
    needed = {name for name in bits if bits[name] != changed.resolve(kind, name).QUANTIZER.BIT}
    entries = _globs(fixed, needed) if merge else {name: fixed[name] for name in bits if name in needed}
    section: Any = changed.W if kind == "W" else changed.A
    specific = [{glob: [part for pair in settings for part in pair]} for glob, settings in entries.items()]
    specific += [override.to_entry() for override in section.SPECIFIC]
    return changed.replace(f"{kind}.SPECIFIC", specific) if specific else changed


def _globs(fixed: Mapping[str, Settings], needed: set[str]) -> dict[str, Settings]:
    """Entries by name, or by `prefix.*` if all layers below need the same settings, and there are several.

    >>> bit = (("QUANTIZER.BIT", 4),)
    >>> _globs({"a.0": bit, "a.1": bit, "b": bit, "c": ()}, {"a.0", "a.1", "b"})
    {'b': (('QUANTIZER.BIT', 4),), 'a.*': (('QUANTIZER.BIT', 4),)}
    """
    found: dict[str, Settings] = {}

    def cover(prefix: str, names: list[str]) -> None:
        own = [name for name in names if name in needed]
        if not own:
            return
        if prefix and len(own) > 1 and len({fixed[name] for name in names}) == 1:
            found[f"{prefix}.*"] = fixed[own[0]]
            return
        below: dict[str, list[str]] = {}
        start = len(prefix) + 1 if prefix else 0
        for name in names:
            first, dot, _ = name[start:].partition(".")
            if dot:
                below.setdefault(f"{prefix}.{first}" if prefix else first, []).append(name)
            elif name in needed:
                found[name] = fixed[name]
        for longer, inside in below.items():
            cover(longer, inside)

    cover("", list(fixed))
    return found
