"""Rewrites average pools into the form for which runtimes have an integer kernel that is right.

torch exports `AdaptiveAvgPool2d(1)` and `x.mean((2, 3))` as ReduceMean, which ONNX Runtime executes in float, with a
change of the memory layout before it. GlobalAveragePool is the same mean; quantization can be moved through a Squeeze
after it.

Without padding, `count_include_pad` means nothing, and torch sets it. ONNX Runtime's integer kernel (1.31) then divides by
the whole window where `ceil_mode` lets it reach over the edge, so it is set to 0.
"""

from __future__ import annotations

from sparsebit.deploy.onnx_graph.ir_values import become, put_instead, stored, stored_once
from sparsebit.deploy.onnx_graph.packages import ir, numpy


def lay_out_pools(model: ir.Model) -> None:
    """ReduceMean over height and width -> GlobalAveragePool, and Squeeze if the dimensions are dropped; in place.

    AveragePool without padding: no `count_include_pad`.
    """
    for node in list(model.graph):
        if node.op_type == "AveragePool" and not ("pads" in node.attributes and any(node.attributes["pads"].as_ints())):
            node.attributes.pop("count_include_pad", None)
        x = node.inputs[0] if node.op_type == "ReduceMean" else None
        if x is None or x.shape is None or len(x.shape) != 4 or sorted(axis % 4 for axis in _axes(node)) != [2, 3]:
            continue
        old = node.outputs[0]
        new = [ir.node("GlobalAveragePool", [x], name=node.name, metadata_props=dict(node.metadata_props))]
        keeps = node.attributes.get("keepdims")
        if keeps is not None and not keeps.as_int():
            pooled = become(new[0].outputs[0], old, f"{old.name}/pool")
            pooled.shape = ir.Shape([*list(x.shape)[:2], 1, 1])
            axes = stored_once(model, "height_and_width", numpy.array([2, 3], dtype=numpy.int64))
            new.append(ir.node("Squeeze", [pooled, axes], name=f"{node.name}/squeeze"))
        put_instead(model, node, new)


def _axes(node: ir.Node) -> list[int]:
    if "axes" in node.attributes:
        return list(node.attributes["axes"].as_ints())
    axes = stored(node.inputs[1]) if len(node.inputs) > 1 else None
    return [] if axes is None else [int(axis) for axis in axes.reshape(-1)]
