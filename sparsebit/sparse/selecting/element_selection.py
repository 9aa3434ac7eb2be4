"""Which single weights, blocks or N of M are pruned: the lowest scores, in each layer or over all layers together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.sparse.scoring.criteria import Evidence
from sparsebit.sparse.scoring.element_masks import (
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


def left_alone(
    scores: Mapping[str, Tensor], masks: Mapping[str, Tensor], ratios: Mapping[str, float], config: SparseConfig
) -> dict[str, str]:
    """The weights that have a ratio and cannot be pruned, with the reason; raises if no weight can be pruned.

    Reasons: the criterion has no scores of a weight, or the weight is smaller than the unit of pruning.
    """
    asked = [name for name, ratio in ratios.items() if ratio > 0]
    strategy, granularity = config.SPARSER.STRATEGY, config.SPARSER.GRANULARITY
    small = {name: reason for name in asked if (reason := _too_small(masks[name], granularity))}
    if small and len(small) == len(asked):
        name, reason = next(iter(small.items()))
        raise ConfigError(
            f"SPARSER.GRANULARITY={granularity}: no weight of the model is large enough; {name}: {reason}"
        )
    missing = [name for name in asked if name not in scores]
    if missing and len(missing) == len(asked):
        raise ConfigError(
            f"SPARSER.STRATEGY={strategy} does not judge {missing[0]}, nor any other weight that is to be pruned: it "
            "is for TYPE: structured, or no batch reaches a convolution or linear layer; choose another one, as l1norm"
        )
    reason = f"{strategy} does not judge it: no batch reaches it as a convolution or linear layer"
    return {**dict.fromkeys(missing, reason), **small}


def _too_small(mask: Tensor, granularity: str) -> str:
    rows, columns = mask.flatten(1).shape
    if (pattern := n_of_m(granularity)) and columns < pattern[1]:
        return f"{granularity} takes {pattern[1]} columns, and it has {columns}"
    if (block := block_shape(granularity)) and rows <= block[0] and columns <= block[1] and rows * columns > 1:
        return f"a block of {granularity} is the whole weight, {rows}x{columns}"
    return ""


def select_elements(
    scores: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    layers: Mapping[str, tuple[str, ...]],
    ratios: Mapping[str, float],
    config: SparseConfig,
    share: float,
) -> dict[str, Tensor]:
    """The new masks of the weights that lose elements, by name.

    `masks`: the current ones; pruned elements stay pruned, so that steps of a schedule only add. `layers`: of each
    weight. `ratios`: of each weight, at the end; `share`: the share of these ratios that applies after this step.
    """
    sparser = config.SPARSER
    lowest_first = {name: scores[name].masked_fill(~masks[name], -math.inf) for name in masks if ratios[name] > 0}
    if pattern := n_of_m(sparser.GRANULARITY):
        return {name: n_of_m_mask(score, *pattern) for name, score in lowest_first.items()}
    block = block_shape(sparser.GRANULARITY)
    judged = {name: block_scores(score, block) if block else score for name, score in lowest_first.items()}
    is_global = sparser.SCOPE == "global"
    rest = [name for name in judged if is_global and not config.is_overridden(layers[name])]
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


def with_ratios(
    evidence: Mapping[str, Evidence], config: SparseConfig, layers: Mapping[str, tuple[str, ...]], share: float
) -> dict[str, Evidence]:
    """Evidence of all weights with the config's ratio and pattern for their `layers`; `share` as above."""
    return {name: _with_ratio(entry, config, layers.get(name, ()), share) for name, entry in evidence.items()}


def _with_ratio(evidence: Evidence, config: SparseConfig, layers: tuple[str, ...], share: float) -> Evidence:
    """Evidence with the config's ratio for the layers of a weight, if it has one for each; `share` as above."""
    sparser = config.SPARSER
    is_shared = sparser.SCOPE == "global" and not config.is_overridden(layers)
    ratio = None if is_shared or block_shape(sparser.GRANULARITY) else share * config.ratio_of(layers)
    return replace(evidence, ratio=ratio, pattern=n_of_m(sparser.GRANULARITY))
