"""Why a runtime may differ from a file's definition: one row for each reason. A difference without a row is a fault.

The definition is the file in float64. Steps are those of the grid of the site that differs; between sites and at outputs
an error is relative to the largest number that was added up (`ExactFile.magnitude`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

# Runtimes add up float32 products in their own order: some units in the last place of the largest partial sum.
FLOAT_ERROR = 4e-6
# A position on a grid is itself a float32 number: half a unit in the last place of up to 2^16 steps.
POSITION_ERROR = 1e-6


@dataclass(frozen=True)
class Rule:
    """`judge` differs by up to `steps` at a site, or `relative` at an output, after one of the operators `ops`."""

    judge: str
    ops: frozenset[str]
    why: str
    steps: float = 0.0
    relative: float = 0.0


@dataclass(frozen=True)
class Refusal:
    """`judge` does not take some files and says `message` (a regular expression)."""

    judge: str
    message: str
    why: str


@dataclass(frozen=True)
class Unfit:
    """`judge` is not asked about files with sites of so many bits, or with all of the operators `ops`."""

    judge: str
    why: str
    bits: int = 0
    ops: frozenset[str] = frozenset()


RULES: tuple[Rule, ...] = (
    Rule(
        "reference",
        frozenset({"LogSoftmax"}),
        "its LogSoftmax is the logarithm of a softmax that may have become 0",
        relative=inf,
    ),
    Rule(
        "openvino",
        frozenset({"Add"}),
        "a convolution with a sum fused into it does not round before the sum",
        steps=1.0,
    ),
)
REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "onnxruntime",
        "output_dtype INT8 does not match y_zero_point type UINT8",
        "its optimizer gives int8 activations of linear layers a uint8 zero point (opset 21 and later)",
    ),
    Refusal(
        "onnxruntime",
        r"Type 'tensor\(u?int[24]\)' of input parameter .* of operator \(QLinear",
        "it fuses 2- and 4-bit weights into kernels that take 8 bits; with these weights and quantized activations only "
        "files for `virtual` exist, and their export warns",
    ),
    Refusal("openvino", "Unsupported data type U?INT2", "it has no 2-bit integers"),
    Refusal("openvino", r"Unsupported padding mode: \[wrap\]", "it has no circular padding"),
    Refusal("openvino", "Layout rank can't be larger than tensor rank", "two linear layers with one output each"),
    Refusal("reference", "cannot reshape array of size", "its transposed convolution has no groups"),
)
UNFIT: tuple[Unfit, ...] = (
    Unfit("openvino", "it removes Q/DQ pairs of 16 bits: nothing is rounded or clipped there", bits=16),
)


def rules_for(judge: str, ops: Iterable[str]) -> list[Rule]:
    found = set(ops)
    return [rule for rule in RULES if rule.judge == judge and (not rule.ops or rule.ops & found)]


def refusal_of(judge: str, message: str) -> Refusal | None:
    return next((one for one in REFUSALS if one.judge == judge and re.search(one.message, message, re.DOTALL)), None)


def unfit_for(judge: str, bits: Iterable[int], ops: Iterable[str]) -> Unfit | None:
    known, found = set(bits), set(ops)
    rows = (one for one in UNFIT if one.judge == judge)
    return next((one for one in rows if one.bits in known or (one.ops and one.ops <= found)), None)
