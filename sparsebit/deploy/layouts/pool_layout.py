"""Rewrites global average pools into the form for which runtimes have an integer kernel.

torch exports `AdaptiveAvgPool2d(1)` and `x.mean((2, 3))` as ReduceMean, which ONNX Runtime executes in float, with a
change of the memory layout before it. GlobalAveragePool is the same mean; quantization can be moved through a Squeeze
after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsebit.deploy.onnx_graph.initializers import stored_once

if TYPE_CHECKING:
    import onnx_ir as ir

_AXES = "height_and_width"


def lay_out_pools(model: ir.Model) -> None:
    """ReduceMean over height and width -> GlobalAveragePool, and Squeeze if the dimensions are dropped; in place."""
    import numpy
    import onnx_ir as ir

    for node in list(model.graph):
        x = node.inputs[0] if node.inputs else None
        if node.op_type != "ReduceMean" or x is None or x.shape is None or len(x.shape) != 4:
            continue
        if sorted(axis % 4 for axis in _axes(node)) != [2, 3]:
            continue
        pool = ir.node("GlobalAveragePool", [x], name=node.name, metadata_props=dict(node.metadata_props))
        old, new = node.outputs[0], pool.outputs[0]
        keeps = node.attributes.get("keepdims")
        if keeps is not None and not keeps.as_int():
            new.name, new.shape, new.type = f"{old.name}/pool", ir.Shape([*list(x.shape)[:2], 1, 1]), old.type
            axes = stored_once(model, _AXES, numpy.array([2, 3], dtype=numpy.int64))
            squeeze = ir.node("Squeeze", [new, axes], name=f"{node.name}/squeeze")
            model.graph.insert_before(node, [pool, squeeze])
            new = squeeze.outputs[0]
        else:
            model.graph.insert_before(node, pool)
        new.name, new.shape, new.type = old.name, old.shape, old.type
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)


def _axes(node: ir.Node) -> list[int]:
    if "axes" in node.attributes:
        return list(node.attributes["axes"].as_ints())
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    constant = axes.const_value if axes is not None else None
    return [] if constant is None else [int(axis) for axis in constant.numpy().reshape(-1)]
