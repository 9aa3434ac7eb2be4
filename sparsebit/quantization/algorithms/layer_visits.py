"""Helpers for algorithms that change one layer at a time: the layer's input, the owners of its weight, its codes."""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.errors import CalibrationError
from sparsebit.execution.blocks.engine import BatchValues, BlockData
from sparsebit.graph.rewriting.patterns import is_itself
from sparsebit.numerics.reference import dequantize
from sparsebit.numerics.reference import quantize as codes_of
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.quantizers.base import Quantizer


def is_first_call(node: fx.Node) -> bool:
    """Whether no earlier node calls the same layer, so that its parameters are changed only once."""
    root = node.graph.owning_module
    assert root is not None
    layer = root.get_submodule(str(node.target))
    calls = (n for n in node.graph.nodes if n.op == "call_module" and root.get_submodule(str(n.target)) is layer)
    return next(calls) is node


def has_one_input(node: fx.Node) -> bool:
    """Whether the layer is called with its input only."""
    return len(node.args) + len(node.kwargs) == 1 and len(node.all_input_nodes) == 1


def input_of(data: BlockData, values: BatchValues, batch: int) -> Tensor:
    """The layer's input among the values of one batch, of a layer with one input."""
    (source,) = data.block.nodes[0].all_input_nodes
    x = dict(zip(data.block.inputs, values[batch], strict=True))[source]
    assert isinstance(x, Tensor)
    return x


def num_owners(model: nn.Module) -> dict[int, int]:
    """How many layers hold each parameter, and how often the graph reads it by itself, by its id."""
    owners: Counter[int] = Counter()
    for module in model.modules():
        owners.update(id(parameter) for parameter in module._parameters.values())
    graph = getattr(model, "graph", None)
    for node in [] if graph is None else graph.find_nodes(op="get_attr"):
        # The path is that in the user's model: a wrapped layer lists its parameters under it too.
        owners[id(operator.attrgetter(str(node.target))(model))] += 1
    return owners


def weights_outside(model: nn.Module) -> list[str]:
    """The sites of calibrated weights that no visit sees: untraced code calls their layers."""
    graph = getattr(model, "graph", None)
    targets = [] if graph is None else [str(node.target) for node in graph.find_nodes(op="call_module")]
    visited = [model.get_submodule(target) for target in targets]
    seen = {id(layer.weight_quantizer) for layer in visited if is_itself(layer, WeightedQuantOpr)}
    quantizers = [module for module in model.modules() if is_itself(module, Quantizer) and module.target == "weight"]
    return [q.name for q in quantizers if id(q) not in seen and q.is_calibrated and not q.fake_fused]


def folder_name(algorithm: str, options: dict[str, Any]) -> str:
    """The name of the folder that keeps finished layers of a run with these options."""
    return f"{algorithm}-{hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()[:12]}"


@torch.no_grad()
def store_codes(quantizer: Quantizer, weight: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor) -> None:
    """Write the scales, and the dequantized codes as the weight, so that rounding to nearest returns the same codes."""
    quantizer.store_qparams(scale, zero_point)
    weight.copy_(dequantize(codes.to(weight.device), *quantizer.qparams(), quantizer.spec, torch.float64))
    again = codes_of(weight, *quantizer.qparams(), quantizer.spec)
    if not torch.equal(again.double(), codes.double()):
        raise CalibrationError(
            f"{quantizer.name}: {quantizer.spec.dtype_name} codes do not survive in a weight of type {weight.dtype}; "
            "keep the model in float32"
        )
