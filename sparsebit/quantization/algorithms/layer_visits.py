"""Helpers for algorithms that change one layer at a time: the layer's input, the owners of its weight, its codes.

Only a weight that one layer owns, and whose quantizer rounds by the package's operator to a stored grid, can be changed
(`why_weight_stays`). `store_codes` is the one way in which an algorithm writes its result.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from sparsebit.errors import CalibrationError
from sparsebit.execution.blocks.engine import BatchValues, BlockData
from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.rewriting.patterns import is_itself
from sparsebit.numerics.reference import dequantize
from sparsebit.numerics.reference import quantize as codes_of
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.quantizers.base import Quantizer, rounds_by_operator


def is_first_call(node: fx.Node) -> bool:
    """Whether no earlier node calls the same layer, so that its parameters are changed only once."""
    root: Any = node.graph.owning_module
    layer = module_of(node, root)
    return next(n for n in node.graph.nodes if module_of(n, root) is layer) is node


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
    for node in model.graph.find_nodes(op="get_attr") if isinstance(model, fx.GraphModule) else ():
        # Looked up by attribute: a wrapped layer still has its parameters under the path that the user's model has.
        owners[id(operator.attrgetter(str(node.target))(model))] += 1
    return owners


def why_weight_stays(layer: WeightedQuantOpr, owners: dict[int, int]) -> str:
    """Why the layer's weight cannot get other codes; empty if it can."""
    weight, quantizer = layer.op._parameters.get("weight"), layer.weight_quantizer
    if is_parametrized(layer.op) or weight is None:
        return "its weight is computed (pruning, a norm of the weight)"
    if owners.get(id(weight), 1) > 1:
        return "its weight belongs to several layers"
    return "" if has_own_grid(quantizer) else f"the quantizer {quantizer.TYPE!r} rounds in its own way"


def has_own_grid(quantizer: Quantizer) -> bool:
    """Whether it rounds as the operator does, to a scale and zero point that it stores."""
    is_plain = rounds_by_operator(quantizer) and type(quantizer).transform is Quantizer.transform
    return is_plain and {"scale", "zero_point"} <= {*quantizer._parameters, *quantizer._buffers}


def smallest_scale(layer: WeightedQuantOpr) -> Tensor | None:
    """Twice the smallest weight scale for which the bias fits into int32: the algorithm may change the bias, too."""
    bias, roundings = layer.stored_bias(), [rounding for rounding, _ in layer.arithmetics if rounding is not None]
    found = [] if bias is None else [2 * rounding.smallest_scale(bias) for rounding in roundings]
    return functools.reduce(torch.maximum, found) if found else None


def weights_outside(model: nn.Module) -> list[str]:
    """The sites of calibrated weights whose layers untraced code calls, so that no block visit sees them."""
    nodes = model.graph.find_nodes(op="call_module") if isinstance(model, fx.GraphModule) else ()
    visited = [model.get_submodule(str(node.target)) for node in nodes]
    seen = {id(layer.weight_quantizer) for layer in visited if is_itself(layer, WeightedQuantOpr)}
    quantizers = [module for module in model.modules() if is_itself(module, Quantizer) and module.target == "weight"]
    return [q.name for q in quantizers if id(q) not in seen and q.is_calibrated and not q.fake_fused]


def folder_of(resume: str | os.PathLike[str] | None, algorithm: str, options: dict[str, Any]) -> Path | None:
    """The folder in `resume` that keeps finished layers of a run with these options."""
    name = f"{algorithm}-{hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()[:12]}"
    return None if resume is None else Path(resume) / name


@torch.no_grad()
def store_codes(quantizer: Quantizer, weight: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor) -> None:
    """Write the scales, and the dequantized codes as the weight, so that rounding to nearest returns the same codes.

    The codes are not stored anywhere else: simulation, export and further training all round the weight. In half
    precision the dequantized value may round to another code, which is an error.
    """
    quantizer.store_qparams(scale, zero_point)
    weight.copy_(dequantize(codes.to(weight.device), *quantizer.qparams(), quantizer.spec, torch.float64))
    again = codes_of(weight, *quantizer.qparams(), quantizer.spec)
    if not torch.equal(again.double(), codes.double()):
        kind = f"{quantizer.name}: {quantizer.spec.dtype_name}"
        raise CalibrationError(f"{kind} codes do not survive in a {weight.dtype} weight; keep the model in float32")
