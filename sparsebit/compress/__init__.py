"""Combines the methods: `compress` finds the best file under a goal; `choose_channels_and_bits` is a part of it."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

from sparsebit.compress.climbing.known import Candidate, Known
from sparsebit.compress.climbing.result import Result
from sparsebit.compress.climbing.rung import Rung, register_rung
from sparsebit.compress.compress import compress
from sparsebit.compress.judging.metrics import OfModel, PerSample, WholeSet
from sparsebit.compress.networks.joint_search import JointChoice, choose_channels_and_bits
from sparsebit.compress.networks.recipe import Recipe
from sparsebit.compress.networks.study import Study

__all__ = [
    "Candidate",
    "JointChoice",
    "Known",
    "OfModel",
    "PerSample",
    "Recipe",
    "Result",
    "Rung",
    "Study",
    "WholeSet",
    "choose_channels_and_bits",
    "compress",
    "register_rung",
]


class _CallableModule(ModuleType):
    """`sparsebit.compress` is this package and the function of the same name: both ways to use it work."""

    __call__ = staticmethod(compress)
    __signature__ = inspect.signature(compress)


sys.modules[__name__].__class__ = _CallableModule
