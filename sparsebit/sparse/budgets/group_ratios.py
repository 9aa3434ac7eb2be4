"""Which groups of channels a config applies to, and the ratio of each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from sparsebit.sparse.budgets.ratio_search import group_name
from sparsebit.sparse.channels.groups import Group, layers_of
from sparsebit.sparse.group_search import ChannelGroups
from sparsebit.sparse.sparse_config import SparseConfig

KINDS = ("filter", "head", "neuron")


def wanted_groups(groups: ChannelGroups, config: SparseConfig) -> list[Group]:
    """The groups of the kind that `GRANULARITY` names: filters, heads, neurons, or all."""
    name = config.SPARSER.GRANULARITY
    wanted = name if name in KINDS else ""
    return [group for group in groups.groups if not wanted or groups.kind_of(group) == wanted]


def group_ratios(
    groups: Iterable[Group], config: SparseConfig, chosen: Mapping[str, float], spared: Collection[str]
) -> list[float]:
    """The ratio of each group: the one chosen for it, else the config's; 0 if a spared weight produces its channels."""
    return [
        0.0 if is_made_by(group, spared) else chosen.get(group_name(group), config.ratio_of(layers_of(group)))
        for group in groups
    ]


def is_made_by(group: Group, weights: Collection[str]) -> bool:
    """Whether one of these weights produces the channels of a group."""
    return any(dim == 0 and tensor in weights for tensor, dim in group.axes)
