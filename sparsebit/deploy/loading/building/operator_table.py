"""The table of ONNX operators: a row per operator and range of opsets, with the function that builds it in torch.

    @operator("Relu")
    def _relu(call: Call) -> Value:
        return call.emit(F.relu, call.inputs[0])

A row gets a `Call` (the node's inputs and attributes, and the graph in progress) and returns the node's output, or a
list of its outputs. It runs once, when a file is loaded; what it emits is the graph of the module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FIRST, LAST = 11, 26


@dataclass(frozen=True)
class OperatorRow:
    """`first`, `last`: the opsets of its domain in which the operator means what `build` builds."""

    operator: str
    domain: str
    first: int
    last: int
    build: Callable[..., Any]


OPERATORS: dict[tuple[str, str], list[OperatorRow]] = {}


def operator(
    *names: str, first: int = FIRST, last: int = LAST, domain: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the function for these operators."""

    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            rows = OPERATORS.setdefault((domain, name), [])
            assert all(last < row.first or first > row.last for row in rows), f"two rows for {name}"
            rows.append(OperatorRow(name, domain, first, last, build))
        return build

    return register


def row_for(node: Any, opset: int) -> OperatorRow | None:
    """The row of a node in a file of this opset; None if there is none."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    rows = OPERATORS.get((domain, node.op_type), [])
    return next((row for row in rows if domain or row.first <= opset <= row.last), None)
