"""Which groups of channels a config applies to, and the ratio of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sparsebit.config.selectors import Selector, read_overrides
from sparsebit.errors import ConfigError
from sparsebit.sparse.channel_groups import ChannelGroups
from sparsebit.sparse.channels.groups import Group
from sparsebit.sparse.channels.labels import FIXED
from sparsebit.sparse.sparse_config import SparseConfig

KINDS = ("filter", "head", "neuron")


def wanted_groups(groups: ChannelGroups, config: SparseConfig) -> list[Group]:
    """The groups of the kind that `GRANULARITY` names: filters, heads, neurons, or all."""
    kind = config.SPARSER.GRANULARITY
    return [group for group in groups.groups if kind not in KINDS or groups.kind_of(group) == kind]


def is_made_by(group: Group, weights: Collection[str]) -> bool:
    """Whether one of these weights produces the channels of a group."""
    return any(dim == 0 and tensor in weights for tensor, dim in group.axes)


def weights_before_add(groups: ChannelGroups) -> frozenset[str]:
    """The tensors whose output channels (dimension 0) pass an addition of two activations."""
    sets = groups.bench.sets
    added: set[int] = set()
    for step in groups.bench.steps:
        found = [[labels for labels in axes if labels is not None] for _, axes in step.inputs if len(axes) > 1]
        if step.name in ("add", "add_") and sum(map(bool, found)) > 1:
            added |= {sets.find(x) for axes in found for labels in axes for x in labels.tolist() if x > FIXED}
    return frozenset(
        axis.tensor
        for axis in sets.axes
        if axis.dim == 0 and any(sets.find(axis.first + place) in added for place in range(axis.size))
    )


def config_of_ratios(
    config: SparseConfig, layers: Mapping[str, tuple[str, ...]], ratios: Mapping[str, float]
) -> SparseConfig:
    """The config whose `SPECIFIC` sets each group's ratio; `layers`: the layers of each group.

    A layer lies in several groups: that of its inputs, and that of its outputs. The first entry that names a layer of
    a group decides, so a group is written by a layer all of whose other groups were written before (or have the same
    ratio).
    """
    entries: list[dict[str, list[object]]] = []
    left = list(ratios)
    while left:
        # A layer that belongs to one of these groups and to no other group with another ratio.
        own = ((layer, name) for name in left for layer in layers[name])
        found = next((pair for pair in own if len({ratios[one] for one in left if pair[0] in layers[one]}) == 1), None)
        if found is None:
            raise ConfigError(
                f"no order of SPECIFIC can set each group's own ratio: each layer of {left[0]} lies in another group "
                "too; use the ratios in Python, or give these layers one ratio"
            )
        entries.append({found[0]: ["RATIO", ratios[found[1]]]})
        left = [name for name in left if found[0] not in layers[name]]
    overrides = read_overrides([*entries, *(override.to_entry() for override in config.SPARSER.SPECIFIC)])
    names = {layer for found in layers.values() for layer in found}
    selector = Selector(overrides)
    winners = {override.glob for name in names if (override := selector.first(name))}
    kept = [override.to_entry() for override in overrides if override.glob in winners]
    changed = config.replace("SPARSER.RATIO", 0.0).replace("SPARSER.SPECIFIC", kept)
    wrong = [name for name, ratio in ratios.items() if changed.ratio_of(layers[name]) != ratio]
    assert not wrong, f"the config gives other ratios than were chosen at {', '.join(wrong[:5])}"
    return changed
