"""`Placement`: where each site of a plan is in the captured graphs.

The planner's second result, next to the plan. It refers to `fx` nodes, so it holds for one capture only, and is not
saved; `building/attach_quantizers.py` inserts the quantizers by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from sparsebit.graph.ops.op_rows import OpRow


@dataclass(frozen=True)
class AloneAt:
    """A separate quantizer between a tensor and its readers. `num_writes`: in-place writes to the tensor before it."""

    site: str
    source: fx.Node
    readers: tuple[fx.Node, ...]
    num_writes: int
    is_output: bool


@dataclass(frozen=True)
class SharedAt:
    """Readers of a tensor that is on the grid of another site, `owner`: nothing is rounded."""

    name: str
    owner: str
    source: fx.Node
    readers: tuple[fx.Node, ...]


@dataclass(frozen=True)
class InsideOf:
    """An op that holds its quantizers. `node`: None outside of graphs; `source`: what its input quantizer reads.

    `input`, `weight`, `gate`: names of sites, None without a quantizer.
    """

    node: fx.Node | None
    row: OpRow
    layer: str
    source: fx.Node | None = None
    input: str | None = None
    weight: str | None = None
    gate: str | None = None


@dataclass
class RegionPlacement:
    """The placement in one captured graph. `tensors`: in the order in which they are inserted."""

    tensors: list[AloneAt | SharedAt] = field(default_factory=list)
    ops: list[InsideOf] = field(default_factory=list)


@dataclass
class Placement:
    """The placement in the whole model: in each captured graph, and in each layer outside of graphs, by their paths."""

    regions: dict[str, RegionPlacement] = field(default_factory=dict)
    loose: dict[str, InsideOf] = field(default_factory=dict)
