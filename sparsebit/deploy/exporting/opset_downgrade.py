"""Converts a graph to an opset older than those of torch's exporter, if every op has the same meaning there."""

from __future__ import annotations

from sparsebit.deploy.onnx_graph.ir_values import stored
from sparsebit.deploy.onnx_graph.packages import ir, onnx
from sparsebit.errors import DeploymentError

LOWEST_WRITTEN = 18  # by torch's exporter
_OTHER_MEANING = frozenset({"RoiAlign"})  # another default since opset 16


def to_older_opset(model: ir.Model, opset: int) -> None:
    """Mark the model as one of `opset`, in place; an op that the opset lacks is an error."""
    written = model.opset_imports[""]
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain in ("", "ai.onnx") and (why := _downgrade(node, opset, written)):
            raise DeploymentError(
                f"opset_version={opset}: {node.op_type} at {node.name} cannot be written in it: {why}; omit "
                f"opset_version or set it to {LOWEST_WRITTEN} or more"
            )
    model.opset_imports[""] = opset


def _downgrade(node: ir.Node, opset: int, written: int) -> str:
    """Write the node in the form of the older opset, in place; returns why that is impossible, or an empty text."""
    new = onnx.defs.get_schema(node.op_type, written, "")
    try:
        old = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return f"it is of opset {new.since_version}"
    if old.since_version == new.since_version:
        return ""
    if node.op_type in _OTHER_MEANING:
        return "it means something else there"
    # ReduceMean(x, axes) -> ReduceMean(x, axes=...), as it was before opset 18.
    axes = stored(node.inputs[1]) if len(node.inputs) == 2 and old.max_input == 1 and "axes" in old.attributes else None
    if axes is not None:
        node.resize_inputs(1)
        node.attributes["axes"] = ir.AttrInt64s("axes", [int(axis) for axis in axes.reshape(-1)])
    for name in [name for name in node.attributes if name not in old.attributes]:
        # An attribute that the older opset lacks must have the value that the older op implies.
        if node.attributes[name].value and not _has_no_effect(node, name):
            return f"its attribute {name} is newer"
        del node.attributes[name]
    return f"it has at most {old.max_input} inputs there" if len(node.inputs) > old.max_input else ""


def _has_no_effect(node: ir.Node, attribute: str) -> bool:
    """Whether the attribute changes nothing: `num_outputs` if the sizes are given, `allowzero` if no size is 0.

    A computed shape contains a 0 only for an empty tensor.
    """
    given = node.inputs[1] if len(node.inputs) > 1 else None
    if node.op_type == "Split":
        return attribute == "num_outputs" and given is not None
    if node.op_type == "Reshape" and attribute == "allowzero" and given is not None:
        return given.const_value is None or bool(stored(given).all())
    return False
