"""Quantizers: fake-quant of one tensor, each with its own way to learn. Importing this registers the built-in names."""

from __future__ import annotations

from sparsebit.quantization.quantizers import adaround, dorefa, float8, lsq, pact, uniform
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.registration import build_quantizer, quantizer_options, register_quantizer

__all__ = [
    "Quantizer",
    "adaround",
    "build_quantizer",
    "dorefa",
    "float8",
    "lsq",
    "pact",
    "quantizer_options",
    "register_quantizer",
    "uniform",
]
