"""Which weights produce channels that are added to other activations: those of residual streams."""

from __future__ import annotations

from sparsebit.sparse.channels.labels import FIXED
from sparsebit.sparse.group_search import ChannelGroups


def weights_before_add(groups: ChannelGroups) -> frozenset[str]:
    """The tensors whose output channels (dimension 0) pass an addition of two activations."""
    sets = groups.bench.sets
    added: set[int] = set()
    for step in groups.bench.steps:
        found = [axes for _, axes in step.inputs if len(axes) > 1]
        labelled = [[labels for labels in axes if labels is not None] for axes in found]
        if step.name in ("add", "add_") and sum(map(bool, labelled)) > 1:
            added |= {sets.find(x) for axes in labelled for labels in axes for x in labels.tolist() if x > FIXED}
    return frozenset(
        axis.tensor
        for axis in sets.axes
        if axis.dim == 0 and any(sets.find(axis.first + place) in added for place in range(axis.size))
    )
