"""The quantized graphs as Mermaid diagrams."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

from torch import fx, nn

from sparsebit.errors import CaptureError
from sparsebit.folders import replace_text
from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.nodes.node_names import node_name
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.quantization.ops.parameter_reads import QuantizedParameter
from sparsebit.quantization.ops.quant_opr import QuantOpr

_QUANTIZED = (QuantOpr, QuantizedParameter)


def dump_mermaid(qmodel: SimulatedModel, file: str | os.PathLike[str] | IO[str] | None = None) -> str:
    """The graph (every captured one) as a Mermaid diagram; written to `file`, a path or an open file, if given."""
    regions = qmodel.built.captured.regions
    if not regions:
        raise CaptureError("nothing of this model could be traced, so there is no graph to draw; see coverage")
    drawn = {path: to_mermaid(region.graph_module.graph, _label, _style) for path, region in regions.items()}
    lines = (f"%% {path or 'model'}\n{graph}" for path, graph in drawn.items())
    diagram = "\n".join(drawn.values() if len(drawn) == 1 else lines)
    if isinstance(file, (str, os.PathLike)):
        replace_text(Path(file), diagram)
    elif file is not None:
        file.write(diagram)
    return diagram


def _label(node: fx.Node) -> str:
    module = _module(node)
    if module is not None:
        return f"{node_name(node)}<br/>{repr(module) if isinstance(module, _QUANTIZED) else type(module).__name__}"
    if node.op in ("placeholder", "output", "get_attr"):
        return node_name(node)
    return f"{node_name(node)}<br/>{getattr(node.target, '__name__', node.target)}"


def _style(node: fx.Node) -> str:
    module = _module(node)
    return "" if module is None else "quantized" if isinstance(module, _QUANTIZED) else "float"


def _module(node: fx.Node) -> nn.Module | None:
    return module_of(node, cast("fx.GraphModule", node.graph.owning_module))


def to_mermaid(
    graph: fx.Graph, label: Callable[[fx.Node], str], style: Callable[[fx.Node], str] = lambda node: ""
) -> str:
    """`flowchart TD` text; `label` names a node, `style` returns its Mermaid class (empty = none)."""
    lines = ["flowchart TD"]
    for node in graph.nodes:
        text = label(node).replace('"', "'").replace("\n", "<br/>")
        shape = f'(["{text}"])' if node.op in ("placeholder", "output") else f'["{text}"]'
        name = style(node)
        lines.append(f"    {_identifier(node)}{shape}{':::' + name if name else ''}")
    for node in graph.nodes:
        lines.extend(f"    {_identifier(source)} --> {_identifier(node)}" for source in node.all_input_nodes)
    lines.append("    classDef quantized fill:#d6f5d6,stroke:#2e7d32")
    lines.append("    classDef float fill:#f5f5f5,stroke:#9e9e9e")
    return "\n".join(lines) + "\n"


def _identifier(node: fx.Node) -> str:
    # `end` and other words are Mermaid keywords: a prefix makes every node name valid.
    return f"n_{node.name}"
