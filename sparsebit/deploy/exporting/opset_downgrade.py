"""Converts a graph to an opset older than those of torch's exporter, if every op has the same meaning there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsebit.errors import DeploymentError

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

LOWEST_WRITTEN = 18  # by torch's exporter
_OTHER_MEANING = frozenset({"RoiAlign"})  # another default since opset 16


def to_older_opset(model: ir.Model, opset: int) -> None:
    """Mark the model as one of `opset`, in place; an op that the opset lacks is an error."""
    import onnx
    import onnx_ir as ir

    written = model.opset_imports[""]
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain not in ("", "ai.onnx"):
            continue
        try:
            old = onnx.defs.get_schema(node.op_type, opset, "")
        except onnx.defs.SchemaError:
            new = onnx.defs.get_schema(node.op_type, written, "")
            raise _refusal(node, opset, f"it is of opset {new.since_version}") from None
        if old.since_version == onnx.defs.get_schema(node.op_type, written, "").since_version:
            continue
        if node.op_type in _OTHER_MEANING:
            raise _refusal(node, opset, "it means something else there")
        _axes_to_attribute(node, old)
        for name in [name for name in node.attributes if name not in old.attributes]:
            # An attribute that the older opset lacks must have the value that the older op implies.
            if node.attributes[name].value and not _says_nothing(node, name):
                raise _refusal(node, opset, f"its attribute {name} is newer")
            del node.attributes[name]
        if len(node.inputs) > old.max_input:
            raise _refusal(node, opset, f"it has at most {old.max_input} inputs there")
    model.opset_imports[""] = opset


def _axes_to_attribute(node: ir.Node, old: onnx.defs.OpSchema) -> None:
    """ReduceMean(x, axes) -> ReduceMean(x, axes=...), as it was before opset 18."""
    import onnx_ir as ir

    axes = node.inputs[1] if len(node.inputs) == 2 and old.max_input == 1 and "axes" in old.attributes else None
    if axes is not None and axes.const_value is not None:
        numbers = [int(axis) for axis in axes.const_value.numpy().reshape(-1)]
        node.resize_inputs(1)
        node.attributes["axes"] = ir.AttrInt64s("axes", numbers)


def _says_nothing(node: ir.Node, attribute: str) -> bool:
    """Whether the attribute has no effect: a number of parts whose sizes are known, or a rule about absent zeros.

    A computed shape contains a 0 only for an empty tensor.
    """
    given = node.inputs[1] if len(node.inputs) > 1 else None
    if node.op_type == "Split":
        return attribute == "num_outputs" and given is not None
    if node.op_type == "Reshape" and attribute == "allowzero" and given is not None:
        return given.const_value is None or bool(given.const_value.numpy().all())
    return False


def _refusal(node: ir.Node, opset: int, why: str) -> DeploymentError:
    return DeploymentError(
        f"opset_version={opset}: {node.op_type} at {node.name} cannot be written in it: {why}; omit opset_version "
        f"or set it to {LOWEST_WRITTEN} or more"
    )
