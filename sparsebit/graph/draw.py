"""A graph as a Mermaid diagram."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx


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
