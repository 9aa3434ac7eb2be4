"""Global average pools in the form that runtimes have an integer kernel for.

torch exports `AdaptiveAvgPool2d(1)` as ReduceMean, which ONNX Runtime executes in float, with a change of the memory
layout in front of it. GlobalAveragePool is the same mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


def lay_out_pools(model: ir.Model) -> None:
    """ReduceMean over height and width, dimensions kept -> GlobalAveragePool, in place."""
    import onnx_ir as ir

    for node in list(model.graph):
        x = node.inputs[0] if node.inputs else None
        if node.op_type != "ReduceMean" or x is None or x.shape is None or len(x.shape) != 4:
            continue
        keeps = node.attributes.get("keepdims")
        if keeps is not None and not keeps.as_int():
            continue
        if sorted(axis % 4 for axis in _axes(node)) != [2, 3]:
            continue
        pool = ir.node("GlobalAveragePool", [x], name=node.name)
        old, new = node.outputs[0], pool.outputs[0]
        new.name, new.shape, new.type = old.name, old.shape, old.type
        model.graph.insert_before(node, pool)
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)


def _axes(node: ir.Node) -> list[int]:
    if "axes" in node.attributes:
        return list(node.attributes["axes"].as_ints())
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    constant = axes.const_value if axes is not None else None
    return [] if constant is None else [int(axis) for axis in constant.numpy().reshape(-1)]
