from __future__ import annotations

from torch import Tensor, fx, nn

from sparsebit.quantization.inspecting.mermaid import to_mermaid


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.end = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(x) + x


def test_mermaid() -> None:
    graph = fx.symbolic_trace(Model()).graph
    text = to_mermaid(graph, lambda node: node.name, lambda node: "quantized" if node.op == "call_module" else "")
    assert text.splitlines() == [
        "flowchart TD",
        '    n_x(["x"])',
        '    n_end["end"]:::quantized',
        '    n_add["add"]',
        '    n_output(["output"])',
        "    n_x --> n_end",
        "    n_end --> n_add",
        "    n_x --> n_add",
        "    n_add --> n_output",
        "    classDef quantized fill:#d6f5d6,stroke:#2e7d32",
        "    classDef float fill:#f5f5f5,stroke:#9e9e9e",
    ]


def test_labels_cannot_break_the_diagram() -> None:
    text = to_mermaid(fx.symbolic_trace(Model()).graph, lambda node: 'a "quoted"\nlabel')
    assert "[\"a 'quoted'<br/>label\"]" in text
