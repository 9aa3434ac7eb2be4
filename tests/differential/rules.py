"""Why a runtime may differ from a file's definition: one row for each reason. A difference without a row is a fault.

The definition is the file in float64. Steps are those of the grid of the site that differs; at outputs an
error is relative to the largest number that was added up (`ExactFile.magnitude`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from sparsebit.deploy.onnx_graph.qdq_graph import Graph
from tests.differential.patterns import (
    has_16_bits,
    has_bare_linear,
    has_clipped_norm,
    has_counted_padding,
    has_float_bias,
    has_float_weight,
    has_quantized_maximum,
    has_strided_padding,
)

# Runtimes add up float32 products in their own order: some units in the last place of the largest partial sum.
FLOAT_ERROR = 4e-6
# A position on a grid is itself a float32 number: half a unit in the last place of up to 2^16 steps.
POSITION_ERROR = 1e-6


@dataclass(frozen=True)
class Rule:
    """`judge` differs after one of the operators `ops`, in files that are `where`.

    By up to `steps` of the site's grid, or `source_steps` of the grids of the sites before it, or, at an output,
    `relative` to the largest number that was added up.
    """

    judge: str
    ops: frozenset[str]
    why: str
    steps: float = 0.0
    source_steps: float = 0.0
    relative: float = 0.0
    where: Callable[[Graph], bool] = lambda graph: True


@dataclass(frozen=True)
class Refusal:
    """`judge` does not take some files and says `message` (a regular expression)."""

    judge: str
    message: str
    why: str


@dataclass(frozen=True)
class Unfit:
    """`judge` is not asked about files that are `where`: it computes something else (`their_faults.py`)."""

    judge: str
    where: Callable[[Graph], bool]
    why: str


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
        source_steps=0.5,
    ),
    Rule("openvino", frozenset({"Clip"}), "it clips the codes, at whole numbers", source_steps=0.5),
    Rule(
        "onnxruntime",
        frozenset({"Conv", "ConvTranspose", "Gemm"}),
        "it rounds a float bias to int32, with the scale of the input times that of the weight",
        steps=1 / 16,
        relative=1e-4,
        where=has_float_bias,
    ),
    Rule(
        "onnxruntime",
        frozenset({"Conv", "ConvTranspose", "Gemm"}),
        "it rounds the float weights of a layer between two quantizers to int8 (files for other runtimes)",
        steps=inf,
        where=has_float_weight,
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
        r"Type 'tensor\(u?int[24]\)' of input parameter .* of operator \(Q(Linear|Gemm)",
        "it fuses 2- and 4-bit weights into kernels that take 8 bits; with these weights and quantized activations "
        "only files for `virtual` exist, and their export warns",
    ),
    Refusal("openvino", "Unsupported data type U?INT2", "it has no 2-bit integers"),
    Refusal("openvino", r"Unsupported padding mode: \[wrap\]", "it has no circular padding"),
    Refusal("openvino", "Kernel after dilation has size", "it takes no window that is larger than its input"),
    Refusal("openvino", "No suitable implementations", "it has no kernel for some linear layers with one input"),
    Refusal("openvino", "Layout rank can't be larger than tensor rank", "two linear layers with one output each"),
    Refusal("reference", "cannot reshape array of size", "its transposed convolution has no groups"),
    Refusal("reference", "could not broadcast input array", "its transposed convolution takes other strides per axis"),
)
UNFIT: tuple[Unfit, ...] = (
    Unfit("openvino", has_16_bits, "it removes Q/DQ pairs of 16 bits: nothing is rounded or clipped there"),
    Unfit("openvino", has_strided_padding, "it drops the padding of a 1x1 convolution with a stride"),
    Unfit("openvino", has_counted_padding, "it pads the codes of a quantized average with 0"),
    Unfit("openvino", has_quantized_maximum, "it rounds a maximum or minimum to whole numbers before it quantizes it"),
    Unfit("openvino", has_bare_linear, "with one thread it loses the scales of a linear layer without a bias"),
    Unfit("openvino", has_clipped_norm, "it fuses a Clip and a quantizer into a norm, and computes something else"),
)


def rules_for(judge: str, ops: Iterable[str], graph: Graph) -> list[Rule]:
    found = set(ops)
    return [rule for rule in RULES if rule.judge == judge and rule.ops & found and rule.where(graph)]


def refusal_of(judge: str, message: str) -> Refusal | None:
    return next((one for one in REFUSALS if one.judge == judge and re.search(one.message, message, re.DOTALL)), None)


def unfit_for(judge: str, graph: Graph) -> Unfit | None:
    return next((one for one in UNFIT if one.judge == judge and one.where(graph)), None)
