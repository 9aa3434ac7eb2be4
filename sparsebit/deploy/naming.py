"""Nodes named after the layers that they come from; what the exporter noted for itself is dropped.

The exporter attaches Python stack traces to every node: half of a small file, and the paths of the user's machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sparsebit.deploy.qdq import ROLE_KEY, SITE_KEY, ExportedSite
from sparsebit.version import __version__

if TYPE_CHECKING:
    import onnx_ir as ir

_OWN = "sparsebit."


def tidy(model: ir.Model, facts: Mapping[str, str]) -> None:
    """Rename and strip, in place; `facts` become the model's own metadata (`sparsebit.backend`…)."""
    import onnx_ir as ir

    taken: set[str | None] = set()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        layer = _layer_of(node)
        if layer is not None:
            node.name = layer
            _name_bias(node, layer)
        elif node.name is not None and SITE_KEY not in node.metadata_props:
            node.name = node.name.removeprefix("node_")
        if node.name in taken:
            node.name = _free(str(node.name), taken)
        taken.add(node.name)
        _strip(node)
        for value in node.outputs:
            _strip(value)
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        _strip(value)
    for item in (model, model.graph):
        _strip(item)
    model.graph.name = "sparsebit"
    model.producer_name, model.producer_version = "sparsebit", __version__
    model.metadata_props.update({f"{_OWN}{key}": value for key, value in facts.items()})


def describe_sites(model: ir.Model, sites: Iterable[ExportedSite], more: Mapping[str, Mapping[str, Any]]) -> None:
    """Write every site's format, and what `more` knows of it, into the model's metadata as JSON."""
    table = {site.site: {**site.to_dict(), **more.get(site.site, {})} for site in sites}
    model.metadata_props[f"{_OWN}sites"] = json.dumps(table)


def _layer_of(node: ir.Node) -> str | None:
    """The layer whose quantized weight the node reads."""
    for value in node.inputs[1:2] if node.op_type != "Gather" else node.inputs[:1]:
        producer = value.producer() if value is not None else None
        if producer is not None and producer.metadata_props.get(ROLE_KEY) == "weight":
            return str(producer.metadata_props[SITE_KEY]).partition("#")[0].rpartition(".weight")[0]
    return None


def _name_bias(node: ir.Node, layer: str) -> None:
    users = [user for user, _ in node.outputs[0].uses()]
    if node.op_type == "MatMul" and len(users) == 1 and users[0].op_type == "Add":
        users[0].name = f"{layer}/bias"


def _free(name: str, taken: set[str | None]) -> str:
    number = 2
    while f"{name}#{number}" in taken:
        number += 1
    return f"{name}#{number}"


def _strip(item: Any) -> None:
    for key in [key for key in item.metadata_props if not key.startswith(_OWN)]:
        del item.metadata_props[key]
    if getattr(item, "doc_string", None):
        item.doc_string = None
