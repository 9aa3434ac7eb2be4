"""Turns ratios of groups into a config that sets them by the names of layers."""

from __future__ import annotations

from collections.abc import Mapping

from sparsebit.config.selectors import Selector, read_overrides
from sparsebit.errors import ConfigError
from sparsebit.sparse.sparse_config import SparseConfig


def config_of_ratios(
    config: SparseConfig, layers: Mapping[str, tuple[str, ...]], ratios: Mapping[str, float]
) -> SparseConfig:
    """The config whose `SPECIFIC` sets each group's ratio; `layers`: the layers of each group.

    A layer lies in several groups: that of its inputs, and that of its outputs. The first entry that names a layer of
    a group decides, so a group is written by a layer all of whose other groups were written before (or have the same
    ratio).
    """
    entries: list[dict[str, list[object]]] = []
    open_groups = dict.fromkeys(ratios)
    while open_groups:
        found = _next(list(open_groups), layers, ratios)
        if found is None:
            raise ConfigError(
                f"no order of SPECIFIC can set each group's own ratio: each layer of {next(iter(open_groups))} lies in "
                "another group too; use the ratios in Python, or give these layers one ratio"
            )
        layer, group = found
        entries.append({layer: ["RATIO", ratios[group]]})
        for name in [name for name in open_groups if layer in layers[name]]:
            del open_groups[name]
    overrides = read_overrides([*entries, *(override.to_entry() for override in config.SPARSER.SPECIFIC)])
    names = {layer for found in layers.values() for layer in found}
    selector = Selector(overrides)
    winners = {override.glob for name in names if (override := selector.first(name))}
    kept = [override.to_entry() for override in overrides if override.glob in winners]
    changed = config.replace("SPARSER.RATIO", 0.0).replace("SPARSER.SPECIFIC", kept)
    wrong = [name for name, ratio in ratios.items() if changed.ratio_of(layers[name]) != ratio]
    assert not wrong, f"the config gives other ratios than were chosen at {', '.join(wrong[:5])}"
    return changed


def _next(
    names: list[str], layers: Mapping[str, tuple[str, ...]], ratios: Mapping[str, float]
) -> tuple[str, str] | None:
    """A layer that belongs to one of these groups and to no other group with another ratio."""
    for name in names:
        for layer in layers[name]:
            if all(ratios[other] == ratios[name] for other in names if layer in layers[other]):
                return layer, name
    return None
