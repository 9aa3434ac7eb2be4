"""Integer operators (QLinearConv, MatMulInteger, MatMulNBits, …) written as the corresponding float operators.

A table: operator name -> a function that writes the float operator. `writer` is the twin in progress (see
`float_twin`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsebit.deploy.onnx_graph.dequantize import dequantize, unpack_matmul_nbits
from sparsebit.deploy.onnx_graph.packages import numpy
from sparsebit.deploy.onnx_graph.qdq_graph import attribute
from sparsebit.errors import DeploymentError

_INTEGER_OPERATORS = frozenset(
    {"ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "MatMulIntegerToFloat",
     "MatMulNBits", "QGemm", "QAttention", "QEmbedLayerNormalization", "DynamicQuantizeLSTM", "GatherBlockQuantized",
     "MatMulBnb4"}
)  # fmt: skip


def is_integer_operator(node: Any) -> bool:
    """Whether the operator itself computes on quantized numbers."""
    return node.op_type.startswith("QLinear") or node.op_type in _INTEGER_OPERATORS


def _weight(writer: Any, node: Any, value: int, scale: int | None, zero_point: int | None, *, axis: int) -> str:
    """The operand `value` of the node as float: dequantized if it is stored, the float value itself if computed."""
    stored = writer.constant(node.input[value])
    if stored is None:
        return str(node.input[value])
    scales = None if scale is None else _operand(writer, node, scale)
    zeros = None if zero_point is None else _operand(writer, node, zero_point)
    if scales is None:
        scales = numpy.ones(1 if zeros is None else zeros.shape, numpy.float32)
    values = dequantize(stored, scales, zeros, axis=axis)
    return str(writer.store(f"{node.output[0]}/{node.input[value]}", values))


def _operand(writer: Any, node: Any, position: int) -> Any:
    present = position < len(node.input) and node.input[position]
    return writer.constant(node.input[position]) if present else None


def _conv(writer: Any, node: Any) -> None:
    """QLinearConv(x, s_x, z_x, w, s_w, z_w, s_y, z_y, bias)."""
    _layer(writer, node, "Conv", axis=0, bias_at=8)


def _gemm(writer: Any, node: Any) -> None:
    """QGemm(a, s_a, z_a, b, s_b, z_b, bias, s_y, z_y)."""
    _layer(writer, node, "Gemm", axis=0 if attribute(node, "transB", 0) else 1, bias_at=6)


def _layer(writer: Any, node: Any, op: str, *, axis: int, bias_at: int) -> None:
    """The int32 bias has the scale s_x * s_w, times a Gemm's alpha."""
    inputs = [node.input[0], _weight(writer, node, 3, 4, 5, axis=axis)]
    bias = _operand(writer, node, bias_at)
    if bias is not None:
        scale = _operand(writer, node, 1) * _operand(writer, node, 4) * attribute(node, "alpha", 1.0)
        inputs.append(writer.store(f"{node.output[0]}/bias", dequantize(bias, scale, axis=0)))
    writer.add(op, inputs, node.output[0], node.attribute, node.name)


def _matmul(writer: Any, node: Any) -> None:
    """QLinearMatMul(a, s_a, z_a, b, s_b, z_b, s_y, z_y)."""
    operands = [_weight(writer, node, 0, 1, 2, axis=-2), _weight(writer, node, 3, 4, 5, axis=-1)]
    writer.add("MatMul", operands, node.output[0], name=node.name)


def _binary(op: str) -> Callable[[Any, Any], None]:
    """QLinearAdd(a, s_a, z_a, b, s_b, z_b, s_y, z_y)."""

    def write(writer: Any, node: Any) -> None:
        operands = [_weight(writer, node, 0, 1, 2, axis=0), _weight(writer, node, 3, 4, 5, axis=0)]
        writer.add(op, operands, node.output[0], name=node.name)

    return write


def _unary(op: str) -> Callable[[Any, Any], None]:
    """QLinearSigmoid(x, s_x, z_x, s_y, z_y)."""

    def write(writer: Any, node: Any) -> None:
        kept = [item for item in node.attribute if item.name not in ("channels_last", "opset")]
        writer.add(op, [node.input[0]], node.output[0], kept, node.name)

    return write


def _concat(writer: Any, node: Any) -> None:
    """QLinearConcat(s_y, z_y, x1, s_1, z_1, x2, s_2, z_2, …)."""
    writer.add("Concat", list(node.input[2::3]), node.output[0], node.attribute, node.name)


def _dynamic_quantize(writer: Any, node: Any) -> None:
    """The floats take the place of the integers, with scale 1 and zero point 0; later products with the scale stay."""
    writer.rename(node.output[0], node.input[0])
    for name, value in zip(node.output[1:], (1, 0), strict=False):
        writer.store(name, numpy.float32(value))


def _integer_product(op: str, axis: int) -> Callable[[Any, Any], None]:
    """MatMulInteger(a, b, z_a, z_b), ConvInteger(x, w, z_x, z_w): later nodes multiply by their scales."""

    def write(writer: Any, node: Any) -> None:
        operands = [node.input[0], _weight(writer, node, 1, None, 3, axis=axis)]
        writer.add(op, operands, node.output[0], node.attribute, node.name)

    return write


def _matmul_to_float(scale: int, zero_point: int, bias: int) -> Callable[[Any, Any], None]:
    def write(writer: Any, node: Any) -> None:
        product = [node.input[0], _weight(writer, node, 1, scale, zero_point, axis=-1)]
        _product_and_bias(writer, node, product, bias)

    return write


def _product_and_bias(writer: Any, node: Any, operands: list[str], bias: int) -> None:
    if len(node.input) > bias and node.input[bias]:
        writer.add("MatMul", operands, f"{node.output[0]}/product", name=node.name)
        writer.add("Add", [f"{node.output[0]}/product", node.input[bias]], node.output[0])
    else:
        writer.add("MatMul", operands, node.output[0], name=node.name)


def no_twin(node: Any, how: str = "") -> DeploymentError:
    """The error for an operator without a float twin."""
    return DeploymentError(
        f"{node.op_type}{how} at {node.name or node.output[0]}: no float twin of this operator is known; compare with "
        "the float file itself (--against float.onnx)"
    )


def _matmul_nbits(writer: Any, node: Any) -> None:
    """MatMulNBits(a, packed, scales, zero_points, group_index, bias)."""
    if len(node.input) > 4 and node.input[4]:
        raise no_twin(node, " with a group index (act-order)")
    weight = unpack_matmul_nbits(
        writer.constant(node.input[1]),
        writer.constant(node.input[2]),
        _operand(writer, node, 3),
        rows=attribute(node, "N"),
        columns=attribute(node, "K"),
        bits=attribute(node, "bits", 4),
        block=attribute(node, "block_size"),
    )
    _product_and_bias(writer, node, [node.input[0], writer.store(f"{node.output[0]}/weight", weight)], 5)


FLOAT_OPERATORS: dict[str, Callable[[Any, Any], None]] = {
    "QLinearConv": _conv,
    "QLinearMatMul": _matmul,
    "QGemm": _gemm,
    "QLinearConcat": _concat,
    "ConvInteger": _integer_product("Conv", 0),
    "MatMulInteger": _integer_product("MatMul", -1),
    "DynamicQuantizeLinear": _dynamic_quantize,
    "DynamicQuantizeMatMul": _matmul_to_float(scale=2, zero_point=3, bias=4),
    "MatMulIntegerToFloat": _matmul_to_float(scale=3, zero_point=5, bias=6),
    "MatMulNBits": _matmul_nbits,
    **{f"QLinear{op}": _binary(op) for op in ("Add", "Mul")},
    **{
        f"QLinear{op}": _unary(op)
        for op in ("Sigmoid", "LeakyRelu", "Softmax", "AveragePool", "GlobalAveragePool", "ReduceMean")
    },
}
