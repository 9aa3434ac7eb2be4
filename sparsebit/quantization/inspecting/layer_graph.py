"""The layers of a quantized model and the connections between them, without the quantizers, for a record."""

from __future__ import annotations

from typing import Any

from torch import fx

from sparsebit.graph.layer_graph import layer_graph as layers_between
from sparsebit.graph.layer_graph import usual_op
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.quantization.ops.quant_opr import QIdentity, QShared, QuantOpr
from sparsebit.records.layer_graph import GraphLayer


def layer_graph(qmodel: SimulatedModel) -> tuple[GraphLayer, ...]:
    """All layers of all captured graphs, in the order of execution; graphs inside untraced modules are separate."""
    return layers_between(qmodel.built.captured.regions, _op, lambda module: isinstance(module, (QIdentity, QShared)))


def _op(node: fx.Node, module: Any) -> str:
    return str(module.row.name) if isinstance(module, QuantOpr) else usual_op(node, module).removeprefix("integer")
