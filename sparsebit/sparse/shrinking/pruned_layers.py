"""The layers of a pruned model for its record: shapes before and after, and the graph of the smaller model."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from sparsebit.errors import CaptureError
from sparsebit.execution.batches import as_call
from sparsebit.graph.capture import capture
from sparsebit.graph.layer_graph import layer_graph
from sparsebit.records.layer_graph import GraphLayer
from sparsebit.records.model_folders import PrunedLayer

log = logging.getLogger(__name__)


def pruned_layers(dense: nn.Module, small: nn.Module) -> tuple[PrunedLayer, ...]:
    """All modules of the dense model that have a weight."""
    after = {name: tuple(weight.shape) for name, weight in small.named_parameters()}
    found = []
    for name, module in dense.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            key = f"{name}.weight" if name else "weight"
            found.append(PrunedLayer(name, type(module).__name__.lower(), tuple(weight.shape), after.get(key)))
    return tuple(found)


def float_graph(model: nn.Module, example_inputs: Any) -> tuple[GraphLayer, ...]:
    """The layers and their connections; empty for a model that cannot be captured."""
    try:
        return layer_graph(capture(model, example=as_call(example_inputs, model)).regions)
    except CaptureError as error:
        log.info("the record has no graph: %s", error)
        return ()
