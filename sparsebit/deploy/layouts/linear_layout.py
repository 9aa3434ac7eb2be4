"""Rewrites linear layers into the form that runtimes turn into integer kernels.

torch keeps a linear's weight as (out, in) and exports it as Gemm, or as Transpose + MatMul + Add if the input has
more than two dimensions. A Transpose after a DequantizeLinear hides the stored integers, and a weight-only Gemm never
becomes MatMulNBits. So the integers themselves are stored transposed, (in, out), before a MatMul.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


def lay_out_linears(model: ir.Model) -> None:
    """Rewrite, in place, every linear whose weight is a DequantizeLinear of stored integers."""
    for node in list(model.graph):
        if node.op_type == "Transpose":
            _absorb_transpose(model, node)
    for node in list(model.graph):
        if node.op_type == "Gemm" and _is_weight_only(node):
            _gemm_to_matmul(model, node)


def _absorb_transpose(model: ir.Model, node: ir.Node) -> None:
    """DequantizeLinear(codes) + Transpose -> DequantizeLinear(codes, transposed in the file)."""
    import onnx_ir as ir

    dequantize = _stored_dequantize(node.inputs[0])
    perm = node.attributes.get("perm")
    if dequantize is None or perm is None or list(perm.as_ints()) != [1, 0]:
        return
    if dequantize.outputs[0].is_graph_output() or node.outputs[0].is_graph_output():
        return
    if any(user.op_type != "Transpose" for user, _ in dequantize.outputs[0].uses()):
        return
    ir.convenience.replace_all_uses_with(node.outputs[0], _transposed(model, dequantize))
    model.graph.remove(node, safe=True)
    if not dequantize.outputs[0].uses():
        model.graph.remove(dequantize, safe=True)


def _gemm_to_matmul(model: ir.Model, gemm: ir.Node) -> None:
    """Gemm(x, w, b, transB=1) -> Add(MatMul(x, w transposed in the file), b)."""
    import onnx_ir as ir

    numbers = {name: attribute.value for name, attribute in gemm.attributes.items()}
    if numbers.get("alpha", 1.0) != 1.0 or numbers.get("beta", 1.0) != 1.0 or numbers.get("transA", 0):
        return
    x, weight, *bias = gemm.inputs
    assert x is not None and weight is not None
    dequantize = weight.producer()
    assert dequantize is not None
    if numbers.get("transB", 0):
        if len(weight.uses()) > 1 or weight.is_graph_output():
            return
        weight = _transposed(model, dequantize)
    output = gemm.outputs[0]
    product = ir.node("MatMul", [x, weight], name=gemm.name)
    new = [product]
    if bias and bias[0] is not None:
        product.outputs[0].name = f"{output.name}/product"
        new.append(ir.node("Add", [product.outputs[0], bias[0]], name=f"{gemm.name}/bias"))
    last = new[-1].outputs[0]
    for node in new:
        node.outputs[0].shape, node.outputs[0].type = output.shape, output.type
    model.graph.insert_before(gemm, new)
    last.name = output.name
    ir.convenience.replace_all_uses_with(output, last, replace_graph_outputs=True)
    model.graph.remove(gemm, safe=True)
    if not dequantize.outputs[0].uses():
        model.graph.remove(dequantize, safe=True)


def _transposed(model: ir.Model, dequantize: ir.Node) -> ir.Value:
    """A DequantizeLinear like `dequantize`, over the transposed integers; the file holds each tensor once."""
    import onnx_ir as ir

    codes = dequantize.inputs[0]
    assert codes is not None and codes.const_value is not None
    blocked = "block_size" in dequantize.attributes
    _transpose_in_place(codes)
    if blocked:
        for value in dequantize.inputs[1:]:
            assert value is not None
            _transpose_in_place(value)
    attributes = {name: attribute.value for name, attribute in dequantize.attributes.items()}
    if "axis" in attributes:
        attributes["axis"] = 1 - attributes["axis"] % 2
    name = dequantize.name
    dequantize.name = f"{name}/before"
    note = dict(dequantize.metadata_props)
    new = ir.node("DequantizeLinear", list(dequantize.inputs), attributes, name=name, metadata_props=note)
    output = new.outputs[0]
    output.name, output.type = dequantize.outputs[0].name, dequantize.outputs[0].type
    dequantize.outputs[0].name = f"{output.name}/before"
    output.shape = codes.shape
    model.graph.insert_before(dequantize, new)
    return output


def _transpose_in_place(value: ir.Value) -> None:
    import numpy
    import onnx_ir as ir

    assert value.const_value is not None
    tensor = value.const_value
    value.const_value = ir.Tensor(numpy.ascontiguousarray(tensor.numpy().T), dtype=tensor.dtype, name=value.name)
    value.shape = ir.Shape(value.const_value.shape)


def _stored_dequantize(value: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear that computes `value` from a stored 2-D tensor, if it alone reads that tensor."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "DequantizeLinear":
        return None
    codes = node.inputs[0]
    if codes is None or codes.const_value is None or len(codes.const_value.shape) != 2 or len(codes.uses()) != 1:
        return None
    return node


def _is_weight_only(gemm: ir.Node) -> bool:
    x = gemm.inputs[0]
    producer = x.producer() if x is not None else None
    is_quantized = producer is not None and producer.op_type == "DequantizeLinear"
    return not is_quantized and _stored_dequantize(gemm.inputs[1]) is not None
