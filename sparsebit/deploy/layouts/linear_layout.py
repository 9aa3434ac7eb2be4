"""Rewrites linear layers into the form that runtimes turn into integer kernels.

torch keeps a linear's weight as (out, in) and exports it as Gemm, or as Transpose + MatMul + Add if the input has
more than two dimensions. A Transpose after a DequantizeLinear hides the stored integers, and a weight-only Gemm never
becomes MatMulNBits. So the integers themselves are stored transposed, (in, out), before a MatMul.
"""

from __future__ import annotations

from sparsebit.deploy.onnx_graph.ir_values import become, producer, put_instead, remove_unread
from sparsebit.deploy.onnx_graph.packages import ir, numpy
from sparsebit.deploy.onnx_graph.qdq_graph import DEQUANTIZE


def lay_out_linears(model: ir.Model) -> None:
    """Rewrite, in place, every linear whose weight is a DequantizeLinear of stored integers."""
    for node in list(model.graph):
        if node.op_type == "Transpose":
            _absorb_transpose(model, node)
    for node in list(model.graph):
        # A Gemm whose input is quantized too has an integer kernel as it is.
        if node.op_type == "Gemm" and producer(node.inputs[0], DEQUANTIZE) is None:
            dequantize = _stored_dequantize(node.inputs[1])
            if dequantize is not None:
                _gemm_to_matmul(model, node, dequantize)


def _absorb_transpose(model: ir.Model, node: ir.Node) -> None:
    """DequantizeLinear(codes) + Transpose -> DequantizeLinear(codes, transposed in the file)."""
    dequantize, perm = _stored_dequantize(node.inputs[0]), node.attributes.get("perm")
    if dequantize is None or perm is None or list(perm.as_ints()) != [1, 0]:
        return
    if dequantize.outputs[0].is_graph_output() or node.outputs[0].is_graph_output():
        return
    if any(user.op_type != "Transpose" for user, _ in dequantize.outputs[0].uses()):
        return
    ir.convenience.replace_all_uses_with(node.outputs[0], _transposed(model, dequantize))
    model.graph.remove(node, safe=True)
    remove_unread(model, dequantize)


def _gemm_to_matmul(model: ir.Model, gemm: ir.Node, dequantize: ir.Node) -> None:
    """Gemm(x, w, b, transB=1) -> Add(MatMul(x, w transposed in the file), b)."""
    numbers = {name: attribute.value for name, attribute in gemm.attributes.items()}
    if numbers.get("alpha", 1.0) != 1.0 or numbers.get("beta", 1.0) != 1.0 or numbers.get("transA", 0):
        return
    x, weight, *bias = gemm.inputs
    assert weight is not None
    if numbers.get("transB", 0):
        if len(weight.uses()) > 1 or weight.is_graph_output():
            return
        weight = _transposed(model, dequantize)
    new = [ir.node("MatMul", [x, weight], name=gemm.name)]
    if bias and bias[0] is not None:
        product = become(new[0].outputs[0], gemm.outputs[0], f"{gemm.outputs[0].name}/product")
        new.append(ir.node("Add", [product, bias[0]], name=f"{gemm.name}/bias"))
    put_instead(model, gemm, new)
    remove_unread(model, dequantize)


def _transposed(model: ir.Model, dequantize: ir.Node) -> ir.Value:
    """A DequantizeLinear like `dequantize`, over the transposed integers; the file holds each tensor once."""
    for value in dequantize.inputs if "block_size" in dequantize.attributes else dequantize.inputs[:1]:
        assert value is not None and value.const_value is not None
        tensor = value.const_value
        value.const_value = ir.Tensor(numpy.ascontiguousarray(tensor.numpy().T), dtype=tensor.dtype, name=value.name)
        value.shape = ir.Shape(value.const_value.shape)
    attributes = {name: attribute.value for name, attribute in dequantize.attributes.items()}
    if "axis" in attributes:
        attributes["axis"] = 1 - attributes["axis"] % 2
    name, old, codes = dequantize.name, dequantize.outputs[0], dequantize.inputs[0]
    # The new node and value take the names of the old ones, by which layers and sites are found in the file.
    dequantize.name = f"{name}/before"
    note = dict(dequantize.metadata_props)
    new = ir.node(DEQUANTIZE, list(dequantize.inputs), attributes, name=name, metadata_props=note)
    output = become(new.outputs[0], old)
    old.name = f"{output.name}/before"
    assert codes is not None
    output.shape = codes.shape
    model.graph.insert_before(dequantize, new)
    return output


def _stored_dequantize(value: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear that computes `value` from a stored 2-D tensor, if it alone reads that tensor."""
    node = producer(value, DEQUANTIZE)
    codes = None if node is None else node.inputs[0]
    is_matrix = codes is not None and codes.const_value is not None and len(codes.const_value.shape) == 2
    return node if codes is not None and is_matrix and len(codes.uses()) == 1 else None
