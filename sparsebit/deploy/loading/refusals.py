"""Files that cannot become a float module, refused with what to do: quantized, with subgraphs or unknown operators."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from sparsebit.deploy.loading.building.operator_table import row_for
from sparsebit.deploy.onnx_graph.qdq_graph import opset
from sparsebit.errors import DeploymentError

_QUANTIZED = frozenset({
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QGemm",
    "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention", "QEmbedLayerNormalization", "MatMulNBits",
    "MatMulBnb4", "DynamicQuantizeLSTM", "GatherBlockQuantized", "QMoE",
})  # fmt: skip
_MOST_NAMES = 5


def refuse_other_files(model: Any, nodes: Iterable[Any], path: str | os.PathLike[str]) -> None:
    """Raise for a quantized file, for nodes with subgraphs, and for operators without a row: all of them at once."""
    nodes = list(nodes)
    _refuse_quantized(model, nodes, path)
    _refuse_subgraphs(nodes, path)
    version = opset(model)
    missing: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        if row_for(node, version) is None:
            missing[_operator(node)].append(_name(node))
    if missing:
        lines = [f"\n  {operator}: {_shown(names)}" for operator, names in sorted(missing.items())]
        raise DeploymentError(
            f"{path} (opset {version}) has operators that load_onnx has no rule for:{''.join(lines)}\n"
            "Remove them from the file (pre- and postprocessing often can be), or load the model from its PyTorch code"
        )


def _refuse_quantized(model: Any, nodes: list[Any], path: str | os.PathLike[str]) -> None:
    found = [node for node in nodes if node.op_type in _QUANTIZED or node.op_type.startswith("QLinear")]
    if not found:
        return
    kinds = ", ".join(sorted({node.op_type for node in found})[:_MOST_NAMES])
    writer = f", by {model.producer_name}" if model.producer_name else ""
    raise DeploymentError(
        f"{path} is quantized already{writer}: {len(found)} nodes such as {_name(found[0])} ({kinds}). Give the float "
        "file that it was made from; `sparsebit audit` and `sparsebit check` take quantized files as they are"
    )


def _refuse_subgraphs(nodes: list[Any], path: str | os.PathLike[str]) -> None:
    found = [n for n in nodes if any(item.HasField("g") or len(item.graphs) for item in n.attribute)]
    if not found:
        return
    names = _shown([f"{_name(node)} ({node.op_type})" for node in found])
    raise DeploymentError(
        f"{path} has subgraphs, which run by a condition or in a loop: {names}; a model that load_onnx takes has none. "
        "Export it with fixed control flow (torch.onnx.export with dynamo=True), or simplify it with onnxsim"
    )


def _operator(node: Any) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else str(node.op_type)


def _name(node: Any) -> str:
    return repr(str(node.name or next(iter(node.output), "")))


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
