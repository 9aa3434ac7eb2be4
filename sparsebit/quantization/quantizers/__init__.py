"""Quantizers: fake-quant of one tensor, each with its own way to learn. Importing this registers the built-in names."""

from __future__ import annotations

from sparsebit.quantization.quantizers import dorefa, lsq, pact, uniform
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.registration import build_quantizer, register_quantizer

__all__ = ["Quantizer", "build_quantizer", "dorefa", "lsq", "pact", "register_quantizer", "uniform"]
