"""Which residual blocks are removed: those with the lowest mean scores, over all blocks that share a ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.sparse.scoring.element_masks import num_pruned
from sparsebit.sparse.selecting.residual_blocks import ResidualBlock, ResidualBlocks
from sparsebit.sparse.shrinking.surgery import ChannelPlan
from sparsebit.sparse.sparse_config import SparseConfig


def select_blocks(
    blocks: Sequence[ResidualBlock],
    scores: Mapping[str, Tensor],
    config: SparseConfig,
    share: float,
    gone: frozenset[str] = frozenset(),
) -> list[ResidualBlock]:
    """The blocks that are removed in this step: `share` of the ratio, among all blocks with the same ratio.

    `scores`: of parameters, by name. A name in `SPARE` or `SPECIFIC` is that of the block or of a layer in it. `gone`:
    names of the blocks that were removed before; they are chosen first, so that steps of a schedule only add.
    """
    sets: dict[tuple[bool, float], list[ResidualBlock]] = {}
    for block in blocks:
        names = (block.name, *sorted({name.rpartition(".")[0] for name in block.parameters}))
        if ratio := config.ratio_of(names):
            sets.setdefault((config.is_overridden(names), ratio), []).append(block)
    dead = []
    for (_, ratio), members in sets.items():
        found = [
            -math.inf if block.name in gone else block_score(block, scores, config.SPARSER.STRATEGY)
            for block in members
        ]
        order = torch.tensor(found, dtype=torch.float64).sort(stable=True).indices.tolist()
        dead += [members[place] for place in order[: num_pruned(share * ratio, len(members))]]
    return dead


def mask_blocks(masks: Mapping[str, Tensor], dead: Sequence[ResidualBlock]) -> None:
    """Set the masks, in place: False in all parameters of these blocks, and in no other."""
    names = {name for block in dead for name in block.parameters}
    for name, mask in masks.items():
        mask.fill_(name not in names)


def plan_without(blocks: ResidualBlocks, names: Sequence[str]) -> ChannelPlan:
    """The plan that removes these blocks; norms after their additions stay."""
    norms = {block.name: block.norms for block in blocks.blocks if block.norms and block.name in names}
    return ChannelPlan(skipped=tuple(names), norms=norms)


def block_score(block: ResidualBlock, scores: Mapping[str, Tensor], strategy: str) -> float:
    """The mean of the scores of a block's weights, of all that the criterion judges."""
    judged = [scores[name].double() for name in block.parameters if name in scores]
    if not judged:
        raise ConfigError(
            f"SPARSER.STRATEGY={strategy}: it judges none of the parameters of the block {block.name}; choose another "
            "one, or spare the block with SPARE"
        )
    return sum(float(score.sum()) for score in judged) / sum(score.numel() for score in judged)
