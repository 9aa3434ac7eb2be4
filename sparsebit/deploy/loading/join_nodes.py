"""Nodes that exporters wrote apart, joined to the operator that they came from: fewer places to round at.

A linear layer is a MatMul and the Add of its bias; before opset 17 a LayerNormalization is nine nodes, before 20 a Gelu
is five, and SiLU is x * Sigmoid(x). Runtimes join them too; a quantizer in between would keep them from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from sparsebit.deploy.onnx_graph.packages import onnx
from sparsebit.deploy.onnx_graph.qdq_graph import Graph, attribute

DOMAIN = "sparsebit"  # of the operators that are made here


class Group(NamedTuple):
    """`nodes` in any order, of which `last` makes the result; `joined` replaces them."""

    nodes: tuple[Any, ...]
    last: Any
    joined: Any


def joined_nodes(model: Any, nodes: list[Any]) -> list[Any]:
    """The nodes in order, with known groups replaced by one node each, in the place of the group's last."""
    graph = Graph(model)
    gone: set[int] = set()
    made: dict[int, Any] = {}
    for node in nodes:
        rule = _RULES.get(node.op_type)
        group = rule(graph, node) if rule is not None and id(node) not in gone else None
        if group is not None and not any(id(one) in gone for one in group.nodes):
            gone |= {id(one) for one in group.nodes}
            made[id(group.last)] = group.joined
    return [made.get(id(node), node) for node in nodes if id(node) not in gone or id(node) in made]


def _joined(op: str, group: tuple[Any, ...], inputs: list[str], **attributes: Any) -> Group:
    first, last = group[0], group[-1]
    node = onnx.helper.make_node(op, inputs, [last.output[0]], name=first.name, domain=DOMAIN, **attributes)
    node.metadata_props.extend(first.metadata_props)
    return Group(group, last, node)


def _reader(graph: Graph, node: Any, *kinds: str) -> Any:
    """The one node that reads the node's output, if it is of these kinds and the output is none of the model's."""
    readers = graph.readers[node.output[0]]
    return readers[0] if _is_inner(graph, node.output[0]) and readers[0].op_type in kinds else None


def _is_inner(graph: Graph, name: str) -> bool:
    """Whether one node reads the value and the model does not return it."""
    return len(graph.readers[name]) == 1 and name not in graph.outputs


def _other(node: Any, name: str) -> str:
    """The other input of a node of two."""
    return str(node.input[1] if node.input[0] == name else node.input[0])


def _number(graph: Graph, name: str) -> float | None:
    """A constant of one number."""
    array = graph.constant(name)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def _is_near(number: float | None, wanted: float) -> bool:
    return number is not None and math.isclose(number, wanted, rel_tol=1e-4)


def _with_bias(graph: Graph, node: Any) -> Group | None:
    """A MatMul with a constant matrix whose only reader adds a constant vector."""
    add = _reader(graph, node, "Add")
    weight = _dims(graph, node.input[1])
    if add is None or weight is None or len(weight) != 2:
        return None
    other = _other(add, node.output[0])
    bias = _dims(graph, other)
    if bias is None or not bias or bias[-1] != weight[-1] or any(size != 1 for size in bias[:-1]) or len(bias) > 2:
        return None
    return _joined("MatMulAddBias", (node, add), [*node.input, other])


def _dims(graph: Graph, name: str) -> list[int] | None:
    """The shape of a stored tensor, also behind a Transpose of two axes."""
    stored = graph.stored(name)
    if stored is not None:
        return list(stored.dims)
    node = graph.producer.get(name)
    if node is not None and node.op_type == "Transpose":
        inner = graph.stored(node.input[0])
        if inner is not None and len(inner.dims) == 2:
            return list(inner.dims)[::-1]
    return None


def _gated(graph: Graph, node: Any) -> Group | None:
    """X * Sigmoid(x) is SiLU, and x * HardSigmoid(x) with a slope of 1/6 is HardSwish."""
    product = _reader(graph, node, "Mul")
    if product is None or _other(product, node.output[0]) != node.input[0]:
        return None
    if node.op_type == "Sigmoid":
        return _joined("Swish", (node, product), [node.input[0]])
    if not _is_near(attribute(node, "alpha", 0.2), 1 / 6) or attribute(node, "beta", 0.5) != 0.5:
        return None
    return _joined("HardSwish", (node, product), [node.input[0]])


def _gelu(graph: Graph, erf: Any) -> Group | None:
    """0.5 * x * (1 + Erf(x / sqrt(2))), the factors in any order."""
    scaled, add = graph.producer.get(erf.input[0]), _reader(graph, erf, "Add")
    if scaled is None or add is None or not _is_inner(graph, erf.input[0]):
        return None
    source = _scaled(graph, scaled, math.sqrt(0.5))
    if source is None or not _is_near(_number(graph, _other(add, erf.output[0])), 1.0):
        return None
    group, half, whole = [scaled, erf, add], False, False
    while not (half and whole):
        product = _reader(graph, group[-1], "Mul")
        if product is None:
            return None
        other = _other(product, group[-1].output[0])
        maker = graph.producer.get(other)
        if other == source and not whole:
            whole = True
        elif _is_near(_number(graph, other), 0.5) and not half:
            half = True
        elif maker is not None and not half and not whole and _scaled(graph, maker, 0.5) == source:
            half = whole = True
            if _is_inner(graph, other):
                group.insert(0, maker)
        else:
            return None
        group.append(product)
    return _joined("Gelu", tuple(group), [source])


def _scaled(graph: Graph, node: Any, factor: float) -> str | None:
    """The value that a node multiplies by the factor."""
    if node.op_type not in ("Mul", "Div"):
        return None
    for source, number in ((node.input[0], node.input[1]), (node.input[1], node.input[0])):
        if _is_near(_number(graph, number), factor if node.op_type == "Mul" else 1 / factor):
            return str(source) if node.op_type == "Mul" or number == node.input[1] else None
    return None


def _layer_norm(graph: Graph, mean: Any) -> Group | None:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias, over the last axis."""
    subtract = _reader(graph, mean, "Sub")
    if subtract is None or subtract.input[0] != mean.input[0] or not _is_of_last_axis(graph, mean):
        return None
    centred = subtract.output[0]
    kinds = {node.op_type: node for node in graph.readers[centred]}
    square, divide = kinds.get("Pow", kinds.get("Mul")), kinds.get("Div")
    if square is None or divide is None or len(graph.readers[centred]) != 2 or centred in graph.outputs:
        return None
    is_square = square.op_type == "Pow" and _is_near(_number(graph, square.input[1]), 2.0)
    if not is_square and list(square.input) != [centred, centred]:
        return None
    variance = _reader(graph, square, "ReduceMean")
    add = None if variance is None or not _is_of_last_axis(graph, variance) else _reader(graph, variance, "Add")
    root = None if add is None else _reader(graph, add, "Sqrt")
    if root is None or _reader(graph, root, "Div") is not divide or divide.input[0] != centred:
        return None
    eps = _number(graph, _other(add, variance.output[0]))
    scale = _reader(graph, divide, "Mul")
    weight = "" if scale is None else _other(scale, divide.output[0])
    size = _dims(graph, weight)
    if eps is None or size is None or len(size) != 1:
        return None
    group, inputs = [mean, subtract, square, variance, add, root, divide, scale], [mean.input[0], weight]
    shift = _reader(graph, scale, "Add")
    bias = "" if shift is None else _other(shift, scale.output[0])
    if shift is not None and _dims(graph, bias) == size:
        group, inputs = [*group, shift], [*inputs, bias]
    return _joined("LayerNormalization", tuple(group), inputs, epsilon=eps, axis=-1)


def _is_of_last_axis(graph: Graph, node: Any) -> bool:
    axes = attribute(node, "axes")
    if axes is None and len(node.input) > 1:
        array = graph.constant(node.input[1])
        axes = None if array is None else array.reshape(-1).tolist()
    return axes is not None and list(axes) == [-1] and attribute(node, "keepdims", 1) == 1


_RULES: dict[str, Callable[[Graph, Any], Group | None]] = {
    "MatMul": _with_bias,
    "Sigmoid": _gated,
    "HardSigmoid": _gated,
    "Erf": _gelu,
    "ReduceMean": _layer_norm,
}
