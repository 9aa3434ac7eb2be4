"""Names nodes after the layers that they come from, and drops the exporter's own metadata.

The exporter attaches Python stack traces to every node: half of a small file, and the paths of the user's machine.
"""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from sparsebit.deploy.exporting.qdq import ROLE_KEY, SITE_KEY, ExportedSite
from sparsebit.deploy.onnx_graph.fusion_site import HEAVY
from sparsebit.deploy.onnx_graph.ir_values import producer
from sparsebit.deploy.onnx_graph.model_file import OWN_PRODUCER
from sparsebit.deploy.onnx_graph.packages import ir
from sparsebit.deploy.onnx_graph.qdq_graph import OFF_KEY
from sparsebit.version import __version__

_OWN = "sparsebit."
_SCOPES = "pkg.torch.onnx.name_scopes"
_ROOT = "module.model."  # the quantized model inside the exported call


def tidy(model: ir.Model, facts: Mapping[str, str], switched_off: Mapping[str, str] | None = None) -> None:
    """Rename and strip, in place; `facts` become the model's own metadata (`sparsebit.backend`…).

    `switched_off`: layers and modules that the config keeps in float, with the key that is stored at their nodes.
    """
    taken: set[str | None] = set()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        layer = _layer_of(node) or _note_off(node, switched_off or {})
        if layer is not None:
            node.name = layer
            users = [user for user, _ in node.outputs[0].uses()]
            if node.op_type == "MatMul" and len(users) == 1 and users[0].op_type == "Add":
                users[0].name = f"{layer}/bias"
        elif node.name is not None and SITE_KEY not in node.metadata_props:
            node.name = node.name.removeprefix("node_")
        if node.name in taken:
            node.name = _free(str(node.name), taken)
        taken.add(node.name)
        _strip(node, *node.outputs)
    _strip(*model.graph.inputs, *model.graph.initializers.values(), model, model.graph)
    model.graph.name = "sparsebit"
    model.producer_name, model.producer_version = OWN_PRODUCER, __version__
    model.metadata_props.update({f"{_OWN}{key}": value for key, value in facts.items()})


def note_switched_off(model: ir.Model, switched_off: Mapping[str, str]) -> None:
    """Store at the nodes of these layers and modules the config key that keeps them in float, in place."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        _note_off(node, switched_off)


def describe_sites(model: ir.Model, sites: Iterable[ExportedSite], more: Mapping[str, Mapping[str, Any]]) -> None:
    """Write every site's format, and its facts in `more`, into the model's metadata as JSON."""
    table = {site.site: {**site.to_dict(), **more.get(site.site, {})} for site in sites}
    model.metadata_props[f"{_OWN}sites"] = json.dumps(table)


def _layer_of(node: ir.Node) -> str | None:
    """The layer whose quantized weight the node reads."""
    for value in node.inputs[1:2] if node.op_type != "Gather" else node.inputs[:1]:
        maker = producer(value)
        if maker is not None and maker.metadata_props.get(ROLE_KEY) == "weight":
            return str(maker.metadata_props[SITE_KEY]).partition("#")[0].rpartition(".weight")[0]
    return None


def _note_off(node: ir.Node, switched_off: Mapping[str, str]) -> str | None:
    """Store at the node that the config switched it off; returns the layer's name if the node is the layer's op.

    The exporter stores the modules that a node was called in, from outermost to innermost, and last its own name.
    """
    scopes = node.metadata_props.get(_SCOPES)
    paths = [path.removeprefix(_ROOT) for path in ast.literal_eval(scopes)[:-1]] if scopes else []
    keys = [switched_off[path] for path in paths if path in switched_off]
    if not keys or SITE_KEY in node.metadata_props:
        return None
    node.metadata_props[OFF_KEY] = keys[-1]
    return paths[-1] if node.op_type in HEAVY else None


def _free(name: str, taken: set[str | None]) -> str:
    return next(free for number in itertools.count(2) if (free := f"{name}#{number}") not in taken)


def _strip(*items: Any) -> None:
    for item in items:
        for key in [key for key in item.metadata_props if not key.startswith(_OWN)]:
            del item.metadata_props[key]
        if getattr(item, "doc_string", None):
            item.doc_string = None
