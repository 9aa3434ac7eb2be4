"""Sparsity: criteria, masks, proved channel groups, and their removal to get a smaller model."""

from __future__ import annotations

from sparsebit.execution.norm_statistics import reestimate_norms
from sparsebit.first_sparsebit import add_former_modules
from sparsebit.sparse.budgets.model_size import ModelSize, model_size
from sparsebit.sparse.budgets.ratio_search import RatioChoice
from sparsebit.sparse.channel_groups import ChannelGroups
from sparsebit.sparse.channels.groups import Group, Spared, Unit
from sparsebit.sparse.group_search import find_groups
from sparsebit.sparse.reconstruction import LayerFit
from sparsebit.sparse.scoring.criteria import Evidence, register_criterion, scale_penalty
from sparsebit.sparse.selecting.element_weights import Zeros
from sparsebit.sparse.selecting.residual_blocks import ResidualBlock, ResidualBlocks, SparedBlock, find_residual_blocks
from sparsebit.sparse.shrinking.pruned_folder import load, save
from sparsebit.sparse.shrinking.skipped_block import SkippedBlock
from sparsebit.sparse.shrinking.surgery import ChannelPlan
from sparsebit.sparse.sparse_config import SparseConfig, parse_sconfig
from sparsebit.sparse.sparse_model import SparseModel
from sparsebit.sparse.sparsers import SMODULE_MAP, SparseOpr, Sparser, register_smodule, register_sparser
from sparsebit.sparse.two_four import TwoFourAdvice, accelerate_2_4, recommend_2_4

__all__ = [
    "SMODULE_MAP",
    "ChannelGroups",
    "ChannelPlan",
    "Evidence",
    "Group",
    "LayerFit",
    "ModelSize",
    "RatioChoice",
    "ResidualBlock",
    "ResidualBlocks",
    "SkippedBlock",
    "Spared",
    "SparedBlock",
    "SparseConfig",
    "SparseModel",
    "SparseOpr",
    "Sparser",
    "TwoFourAdvice",
    "Unit",
    "Zeros",
    "accelerate_2_4",
    "find_groups",
    "find_residual_blocks",
    "load",
    "model_size",
    "parse_sconfig",
    "recommend_2_4",
    "reestimate_norms",
    "register_criterion",
    "register_smodule",
    "register_sparser",
    "save",
    "scale_penalty",
]

add_former_modules(__name__)
