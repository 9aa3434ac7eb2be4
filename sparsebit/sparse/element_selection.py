"""Which single weights, blocks or N of M go: the lowest scores, in each layer or over all layers together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.sparse.criteria import Evidence
from sparsebit.sparse.element_masks import (
    block_scores,
    block_shape,
    from_blocks,
    lowest,
    lowest_of_all,
    n_of_m,
    n_of_m_mask,
    num_pruned,
)
from sparsebit.sparse.sparse_config import SparseConfig


def select_elements(
    scores: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    config: SparseConfig,
    share: float,
    spared: frozenset[str],
) -> dict[str, Tensor]:
    """The new masks of the weights that lose something, by name.

    `masks`: those of now; what is pruned already stays pruned, so that steps of a schedule only add. `share`: of the
    ratio, that holds after this step. `spared`: weights that are left alone, whatever the config says.
    """
    sparser = config.SPARSER
    layers = {name: name.rpartition(".")[0] for name in masks}
    ratios = {name: 0.0 if name in spared else config.ratio_of(layers[name]) for name in masks}
    if missing := [name for name in masks if name not in scores and ratios[name] > 0]:
        raise ConfigError(
            f"SPARSER.STRATEGY={sparser.STRATEGY} does not judge {missing[0]}: it is for TYPE: structured, or the "
            "layer is not of a kind that it knows; choose another one, or spare the layer with SPARE"
        )
    lowest_first = {name: scores[name].masked_fill(~masks[name], -math.inf) for name in masks if ratios[name] > 0}
    if pattern := n_of_m(sparser.GRANULARITY):
        return {name: n_of_m_mask(score, *pattern) for name, score in lowest_first.items()}
    block = block_shape(sparser.GRANULARITY)
    judged = {name: block_scores(score, block) if block else score for name, score in lowest_first.items()}
    is_global = sparser.SCOPE == "global"
    rest = [name for name in judged if is_global and not config.is_overridden((layers[name],))]
    found = {
        name: lowest(score, num_pruned(share * ratios[name], score.numel()))
        for name, score in judged.items()
        if name not in rest
    }
    if rest:
        total = sum(judged[name].numel() for name in rest)
        parts = lowest_of_all([judged[name] for name in rest], num_pruned(share * sparser.RATIO, total))
        found.update(zip(rest, parts, strict=True))
    return {name: from_blocks(kept, block, masks[name]) if block else kept for name, kept in found.items()}


def with_ratio(evidence: Evidence, config: SparseConfig, share: float) -> Evidence:
    """With what the config asks for in the layer, where it asks for something in each; `share` as above."""
    sparser, layer = config.SPARSER, evidence.name.rpartition(".")[0]
    is_shared = sparser.SCOPE == "global" and not config.is_overridden((layer,))
    ratio = None if is_shared or block_shape(sparser.GRANULARITY) else share * config.ratio_of(layer)
    return replace(evidence, ratio=ratio, pattern=n_of_m(sparser.GRANULARITY))
