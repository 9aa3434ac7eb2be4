"""`sites_as_outputs`: the quantized tensors of a program as further outputs, to compare them with the simulation's.

Only for the search of a difference: the file that users get has the outputs of their model. A runtime fuses the same
ops, because the quantize op behind a layer stays its only reader.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from sparsebit.deploy.onnx_graph.packages import numpy
from sparsebit.deploy.programs.qdq_program import SITE

_OPS = torch.ops.quantized_decomposed


class SiteGrid(NamedTuple):
    """The grid of a site's output, which is in float. `zero_point`: as the simulation counts it."""

    scale: float
    zero_point: int

    def codes(self, values: Any) -> Any:
        """The integers of an output (numpy)."""
        return numpy.rint(values / numpy.float32(self.scale)).astype(numpy.int64) + self.zero_point


def sites_as_outputs(module: fx.GraphModule) -> dict[str, SiteGrid]:
    """The sites' grids, in the order of the outputs that they become, in place; a site that runs twice counts once."""
    graph, grids = module.graph, dict[str, SiteGrid]()
    (output,) = graph.find_nodes(op="output")
    added = []
    for node in list(graph.nodes):
        if SITE not in node.meta or node.target is not _OPS.quantize_per_tensor.default:
            continue
        site, zero_point = node.meta[SITE]
        if site in grids:
            continue
        grids[site] = SiteGrid(float(node.args[1]), int(zero_point))
        with graph.inserting_before(output):
            added.append(graph.call_function(_OPS.dequantize_per_tensor.default, (node, *node.args[1:])))
    flat = [*pytree.tree_leaves(output.args[0]), *added]
    output.args = (flat,)
    codegen: Any = graph._codegen
    codegen.pytree_info = codegen.pytree_info._replace(out_spec=pytree.tree_structure([0] * len(flat)))
    module.recompile()
    return grids
