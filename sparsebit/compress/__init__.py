"""Combines several methods: channels and bits in one choice."""

from __future__ import annotations

from sparsebit.compress.joint_search import JointChoice, choose_channels_and_bits

__all__ = ["JointChoice", "choose_channels_and_bits"]
