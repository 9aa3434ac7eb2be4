"""`build`: an ONNX graph and example inputs -> a torch.fx GraphModule."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from sparsebit.deploy.loading.building.call import Call, tensor_of
from sparsebit.deploy.loading.building.graph_builder import GraphBuilder
from sparsebit.deploy.loading.building.moved_numbers import moved_numbers, moves_numbers
from sparsebit.deploy.loading.building.operator_table import row_for
from sparsebit.deploy.loading.building.values import Value, is_constant

# Importing these modules fills the table of operators.
from sparsebit.deploy.loading.operators import (  # noqa: F401
    activations,
    arithmetic,
    constants,
    convolutions,
    indexing,
    moving,
    norms,
    pools,
    products,
    recurrent,
    reductions,
    resizing,
    shapes,
)
from sparsebit.deploy.onnx_graph.packages import onnx
from sparsebit.deploy.onnx_graph.qdq_graph import opset
from sparsebit.errors import DeploymentError

_MOST_INFERRED = 1024  # numbers of a constant that may be sizes


def build(model: Any, nodes: list[Any], feeds: Mapping[str, Any]) -> fx.GraphModule:
    """The module of the graph's nodes, which are in order. `feeds`: an array for each input of the file."""
    with torch.no_grad():
        return _build(model, nodes, feeds)


def _build(model: Any, nodes: list[Any], feeds: Mapping[str, Any]) -> fx.GraphModule:
    values: dict[str, Value] = {}
    for stored in model.graph.initializer:
        with _named(stored.name, "a stored tensor"):
            values[stored.name] = tensor_of(stored)
    graph = GraphBuilder(dict(values), _static_sizes(model))
    for entry in model.graph.input:
        if entry.name not in values:
            values[entry.name] = graph.input(entry.name, torch.from_numpy(feeds[entry.name].copy()))
    version = opset(model)
    last_use = {name: place for place, node in enumerate(nodes) for name in node.input}
    kept = {entry.name for entry in model.graph.output}
    for place, node in enumerate(nodes):
        found = _outputs(node, values, version, graph)
        for name, value in zip(node.output, found, strict=False):
            if name:
                values[name] = value
                if is_constant(value):
                    graph.store(name, value)
        for name in node.input:
            if last_use[name] == place and name not in kept:
                values.pop(name, None)
    missing = [entry.name for entry in model.graph.output if values.get(entry.name) is None]
    if missing:
        raise DeploymentError(f"the outputs {', '.join(missing)} have no rule; remove them from the file")
    return graph.finish([values[entry.name] for entry in model.graph.output])


def _outputs(node: Any, values: Mapping[str, Value], version: int, graph: GraphBuilder) -> list[Value]:
    row = row_for(node, version)
    assert row is not None, "operators without a row are refused first"
    unknown = [name for name in node.input if name and name not in values]
    if unknown:
        raise DeploymentError(
            f"node {node.name!r} ({node.op_type}) reads {unknown[0]!r}, which nothing before it makes"
        )
    call = Call(node, tuple(values[name] if name else None for name in node.input), version, graph)
    with _named(node.name or node.output[0], node.op_type):
        found = moved_numbers(row, call) if moves_numbers(call) else row.build(call)
    return list(found) if isinstance(found, (list, tuple)) else [found]


@contextlib.contextmanager
def _named(name: str, kind: str) -> Iterator[None]:
    """Raise a DeploymentError that names the node for what goes wrong at it: a damaged attribute, sizes that differ."""
    try:
        yield
    except DeploymentError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DeploymentError(f"node {name!r} ({kind}) cannot be computed: {type(error).__name__}: {first}") from error


def _static_sizes(model: Any) -> dict[str, tuple[int | None, ...]]:
    """The sizes that the file fixes, by value's name: from its inputs, and what ONNX infers from them.

    Sizes that the file declares for other values are ignored: after an input was made dynamic by hand they are often
    out of date.
    """
    bare = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    bare.graph.node.extend(model.graph.node)
    bare.graph.input.extend(model.graph.input)
    given = {entry.name for entry in model.graph.input}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= _MOST_INFERRED:
            bare.graph.initializer.append(tensor)
        elif tensor.name not in given:  # of a weight the shape is enough
            bare.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    model = bare
    with contextlib.suppress(Exception):  # it is a help only
        model = onnx.shape_inference.infer_shapes(bare, data_prop=True)
    found: dict[str, tuple[int | None, ...]] = {}
    for entry in [*model.graph.input, *model.graph.value_info]:
        if entry.type.HasField("tensor_type") and entry.type.tensor_type.HasField("shape"):
            dims = entry.type.tensor_type.shape.dim
            found[entry.name] = tuple(int(dim.dim_value) if dim.HasField("dim_value") else None for dim in dims)
    return found
