"""Sparsity: channel groups that are proved, and models that are made smaller."""

from __future__ import annotations

from sparsebit.sparse.channel_groups import Group, Spared, Unit
from sparsebit.sparse.find_groups import ChannelGroups, find_groups
from sparsebit.sparse.pruned_folder import load, save
from sparsebit.sparse.surgery import ChannelPlan

__all__ = ["ChannelGroups", "ChannelPlan", "Group", "Spared", "Unit", "find_groups", "load", "save"]
