"""Facts about a layer from the file alone: the layers it reads, its shape, its multiplications and its weight."""

from __future__ import annotations

import math
import re
from typing import Any

from sparsebit.deploy.onnx_graph.fusion_site import is_layer, label
from sparsebit.deploy.onnx_graph.qdq_graph import Graph, attribute, type_name

_CONVOLUTIONS = ("Conv", "QLinearConv", "ConvInteger")
_PRODUCTS = ("Gemm", "MatMul", "MatMulInteger", "QGemm", "QLinearMatMul")


class LayerFacts:
    """The facts of every layer of one graph, whose shapes ONNX has inferred as far as it can."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        known = [*graph.model.graph.value_info, *graph.model.graph.input, *graph.model.graph.output]
        self._shapes = {
            value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
            for value in known
            if value.type.tensor_type.HasField("shape")
        }
        self._sources: dict[str, tuple[str, ...]] = {}
        for node in graph.nodes:  # in the order of execution, so that no recursion is needed
            found = (label(node),) if is_layer(graph, node) else self._read_by(node)
            self._sources |= dict.fromkeys(filter(None, node.output), found)

    def of(self, node: Any) -> dict[str, Any]:
        """The fields of a `LayerRun`."""
        weight = self._weight(node)
        return {
            "inputs": self._read_by(node),
            "shape": self._shapes.get(node.output[0], ()),
            "macs": self._macs(node, weight),
            "num_bytes": None if weight is None else math.ceil(math.prod(weight.dims) * _bits(weight.data_type) / 8),
            "weight_bits": None if weight is None else _bits(weight.data_type),
        }

    def _read_by(self, node: Any) -> tuple[str, ...]:
        return tuple(dict.fromkeys(layer for name in node.input for layer in self._sources.get(name, ())))

    def _weight(self, node: Any) -> Any:
        """The largest constant that the layer reads, as it is stored."""
        found = [stored for name in node.input if name for stored in [self._stored(name)] if stored is not None]
        return max(found, key=lambda tensor: math.prod(tensor.dims), default=None)

    def _stored(self, name: str) -> Any:
        """The constant behind a value, also through ops that quantize, dequantize or move it."""
        while self.graph.is_weight(name):
            stored = self.graph.stored(name)
            if stored is not None:
                return stored
            name = self.graph.producer[name].input[0]
        return None

    def _macs(self, node: Any, weight: Any) -> int | None:
        """Multiplications, with open sizes counted as 1; None if a size that they depend on is unknown."""
        shape = self._shapes.get(node.output[0])
        if not shape:
            return None
        size = math.prod(max(1, side) for side in shape)
        if node.op_type in _CONVOLUTIONS and weight is not None and weight.dims:
            return int(size * math.prod(weight.dims[1:]))
        if node.op_type in _PRODUCTS:
            inner = self._shapes.get(node.input[0], ())
            if weight is not None and len(weight.dims) > 1:
                across = bool(attribute(node, "transB", 0))
                return int(size * weight.dims[-1 if across else -2])
            return int(size * inner[-1]) if inner and inner[-1] > 0 else None
        return None


def _bits(data_type: int) -> int:
    """32 of `float`, 4 of `uint4`, 8 of `float8e4m3fn`."""
    name = type_name(data_type)
    digits = re.search(r"\d+", name)
    return {"float": 32, "double": 64, "bool": 8}.get(name) or (int(digits[0]) if digits else 32)
