"""Quantization: post-training and quantization-aware training on torch.fx."""

from __future__ import annotations

from sparsebit.config.section import Section
from sparsebit.execution.distillation import DistillationLoss
from sparsebit.graph.op_table import QMODULE_MAP
from sparsebit.quantization.captured_step import CapturedStep
from sparsebit.quantization.freezing import FreezeSchedule
from sparsebit.quantization.observers import Observer, register_observer
from sparsebit.quantization.ops.quant_opr import MultipleInputsQuantOpr, QIdentity, QuantOpr
from sparsebit.quantization.ops.registration import register_qmodule
from sparsebit.quantization.quant_config import parse_qconfig
from sparsebit.quantization.quant_model import QuantModel
from sparsebit.quantization.quantizers import Quantizer, register_quantizer
from sparsebit.quantization.sites import Plan, Site

__all__ = [
    "QMODULE_MAP",
    "CapturedStep",
    "DistillationLoss",
    "FreezeSchedule",
    "MultipleInputsQuantOpr",
    "Observer",
    "Plan",
    "QIdentity",
    "QuantModel",
    "QuantOpr",
    "Quantizer",
    "Section",
    "Site",
    "parse_qconfig",
    "register_observer",
    "register_qmodule",
    "register_quantizer",
]
