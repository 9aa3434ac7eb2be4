"""`GraphLayer`: one layer of a captured model, and whose results it reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphLayer:
    """`op`: the name of the operator (`conv`, `add`), or of the module's class. `inputs`: the layers that it reads."""

    name: str
    op: str
    inputs: tuple[str, ...] = ()
