"""Functions that are computed again rather than kept (`saved_activations`) as modules, which can be hooked."""

from __future__ import annotations

from sparsebit.graph.capture import Captured
from sparsebit.quantization.ops.cheap import CHEAP_FUNCTIONS, CheapFunction


def wrap_cheap_functions(captured: Captured) -> None:
    for region in captured.regions.values():
        root = region.graph_module
        for node in list(root.graph.nodes):
            is_cheap = node.op == "call_function" and node.target in CHEAP_FUNCTIONS
            if not is_cheap or node.kwargs.get("inplace"):
                continue
            name = f"{node.name}_function"
            root.add_submodule(name, CheapFunction(node.target).train(root.training))
            node.op, node.target = "call_module", name
        root.recompile()
