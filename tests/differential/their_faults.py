"""Minimal files that a runtime computes otherwise than ONNX defines them, each found by a random net.

`FAULTS`: name -> the judge, and a function that builds the file. A runtime that is right about one of them needs its
row in `rules.py`, and the rewrite in `sparsebit/deploy/layouts`, no longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
from onnx import TensorProto

from tests.deploy.tiny_files import Tiny

SHAPE = (1, 8, 5, 5)


def strided_padding() -> Any:
    tiny = Tiny(SHAPE)
    x = tiny.node("Relu", ["x"], "relu")
    weight = tiny.float_weight("w", (8, 8, 1, 1))
    return tiny.model(tiny.node("Conv", [x, weight], "conv", kernel_shape=[1, 1], strides=[2, 2], pads=[1] * 4))


def counted_padding() -> Any:
    tiny = Tiny(SHAPE)
    x = tiny.quantized("x", zero_point=128)
    sizes = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}
    return tiny.model(tiny.node("AveragePool", [x], "pool", count_include_pad=1, **sizes))


def quantized_maximum() -> Any:
    tiny = Tiny(SHAPE)
    axes = tiny.constant("axes", numpy.array([2, 3]))
    return tiny.model(tiny.quantized(tiny.node("ReduceMax", ["x", axes], "max")))


def clipped_norm() -> Any:
    tiny = Tiny((3, 6))
    scale = tiny.constant("scale", tiny.rng.uniform(0.3, 1.7, 6).astype(numpy.float32))
    bias = tiny.constant("bias", numpy.zeros(6, numpy.float32))
    y = tiny.node("LayerNormalization", ["x", scale, bias], "norm", axis=-1)
    ends = [tiny.constant("low", numpy.float32(-0.7)), tiny.constant("high", numpy.float32(0.9))]
    return tiny.model(tiny.quantized(tiny.node("Clip", [y, *ends], "clip")))


def bare_linear() -> Any:
    tiny = Tiny((3, 32))
    x = tiny.node("MatMul", [tiny.quantized("x"), tiny.weight("w", (32, 16), axis=1)], "first")
    x = tiny.quantized(x, scale=0.05)
    return tiny.model(tiny.node("MatMul", [x, tiny.weight("v", (16, 8), axis=1)], "second"))


def sixteen_bits() -> Any:
    """The largest number of the grid is 0.03; the inputs are larger."""
    tiny = Tiny(SHAPE)
    x = tiny.quantized("x", zero_point=32768, dtype=numpy.uint16, scale=1e-6)
    return tiny.model(tiny.node("Relu", [x], "relu"))


def average_over_the_edge() -> Any:
    tiny = Tiny(SHAPE)
    sizes = {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1, "count_include_pad": 1}
    return tiny.model(tiny.quantized(tiny.node("AveragePool", [tiny.quantized("x")], "pool", **sizes)))


def logarithm_of_zero() -> Any:
    tiny = Tiny((1, 3))
    x = tiny.node("Mul", ["x", tiny.constant("large", numpy.float32(1e4))], "mul")
    return tiny.model(tiny.node("LogSoftmax", [x], "log_softmax", axis=-1))


FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "strided padding": ("openvino", strided_padding),
    "counted padding": ("openvino", counted_padding),
    "quantized maximum": ("openvino", quantized_maximum),
    "clipped norm": ("openvino", clipped_norm),
    "bare linear": ("openvino", bare_linear),
    "sixteen bits": ("openvino", sixteen_bits),
    "average over the edge": ("onnxruntime", average_over_the_edge),
    "logarithm of zero": ("reference", logarithm_of_zero),
}


def feeds_of(model: Any) -> dict[str, Any]:
    (value,) = model.graph.input
    assert value.type.tensor_type.elem_type == TensorProto.FLOAT
    shape = [size.dim_value for size in value.type.tensor_type.shape.dim]
    return {value.name: numpy.random.default_rng(0).normal(size=shape).astype(numpy.float32)}
