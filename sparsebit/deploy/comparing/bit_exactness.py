"""Where a file must equal its simulation bit by bit: after kernels that the simulation computes exactly as the runtime.

The result of a float sum depends on its order. If it lies near the boundary between two codes, the code may move by a
step, and all later values then differ too. So a difference is explained if it comes after a float op, or after another
difference. Integer kernels, and ops that only move or clip numbers, explain no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparsebit.deploy.comparing.divergence import CODES
from sparsebit.deploy.exporting.qdq import SITE_KEY
from sparsebit.deploy.onnx_graph.fusion_site import label
from sparsebit.deploy.onnx_graph.qdq_graph import DEQUANTIZE, MOVES, QUANTIZE, Graph

_CLIPS = frozenset({"Relu", "Clip"})
_PLAIN = MOVES | _CLIPS | {"MaxPool", "Pad", "Slice", "Concat", "Split", "Gather", "Expand", DEQUANTIZE, QUANTIZE}
_LAYERS = ("Conv", "Gemm")


@dataclass(frozen=True)
class SimulatedKernels:
    """The parts of a simulation that compute as the runtime's integer kernels do, by sites.

    `layers`: site of the weight -> the sites that its kernel rounds to, one per call, None where it returns floats.
    `sums`, `products`: the sites that the kernel of an addition or a multiplication rounds to.
    """

    layers: Mapping[str, frozenset[str | None]] = field(default_factory=dict)
    sums: frozenset[str] = frozenset()
    products: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Stretch:
    """The ops from some sites (`sources`) to the next site or output of the file (`end`)."""

    end: str
    sources: frozenset[str]
    is_exact: bool


def unexplained(stretches: list[Stretch], is_equal: Mapping[str, bool]) -> Stretch | None:
    """The first stretch that has equal inputs, is exact, and has a different output."""
    wrong = (stretch for stretch in stretches if stretch.is_exact and not is_equal.get(stretch.end, True))
    return next((one for one in wrong if all(is_equal.get(source, False) for source in one.sources)), None)


def stretches(graph: Graph, known: set[str], kernels: SimulatedKernels, in_integers: set[str]) -> list[Stretch]:
    """All of them, in the order of the graph.

    `known`: the sites whose codes are compared. `in_integers`: the layers, by label, that the runtime runs in integers.
    """
    walker = _Walker(graph, known, kernels, in_integers)
    sites = [(_site(node), node.input[0]) for node in graph.nodes if node.op_type == QUANTIZE]
    found = [walker.stretch(site, value, site) for site, value in sites if site in known]
    return [*found, *(walker.stretch(value.name, value.name, None) for value in graph.model.graph.output)]


class _Walker:
    def __init__(self, graph: Graph, known: set[str], kernels: SimulatedKernels, in_integers: set[str]) -> None:
        self.graph, self.known, self.kernels, self.in_integers = graph, known, kernels, in_integers

    def stretch(self, end: str, value: str, site: str | None) -> Stretch:
        sources, seen, is_exact = set[str](), set[str](), True
        waiting = [(value, True)]  # and whether there are only clips between it and the end
        while waiting:
            name, is_direct = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            node = self.graph.producer.get(name)
            if node is None or self.graph.is_weight(name):
                continue  # an input of the file, or a constant
            if node.op_type == QUANTIZE and _site(node) in self.known:
                sources.add(_site(node))
                continue
            is_exact = is_exact and self._is_exact(node, site, is_direct)
            stays = node.op_type in _CLIPS or (site is None and node.op_type in MOVES)
            waiting += [(one, is_direct and stays) for one in _data_of(node)]
        return Stretch(end, frozenset(sources), is_exact)

    def _is_exact(self, node: Any, site: str | None, is_direct: bool) -> bool:
        if node.op_type in _PLAIN:
            return True
        sites: frozenset[str | None] = frozenset()
        if node.op_type in _LAYERS:
            maker = self.graph.producer.get(node.input[1])
            notes = {} if maker is None else {item.key: item.value for item in maker.metadata_props}
            # The second call of a layer has the site `name#2`; kernels are listed by layer.
            sites = self.kernels.layers.get(str(notes.get(SITE_KEY, "")).partition("#")[0], sites)
        elif node.op_type in ("Add", "Mul"):
            sites = sites | (self.kernels.sums if node.op_type == "Add" else self.kernels.products)
        return is_direct and site in sites and label(node) in self.in_integers


def _data_of(node: Any) -> list[str]:
    """The inputs that carry data: a layer's weight and bias, a scale and a shape do not."""
    names = [name for name in node.input if name]
    return names if node.op_type in ("Add", "Mul", "Concat") or node.op_type not in (*_PLAIN, *_LAYERS) else names[:1]


def _site(node: Any) -> str:
    return str(node.output[0]).removesuffix(CODES)
