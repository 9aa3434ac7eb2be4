"""Where the sites of a plan are in the captured graphs: the planner's second result, for `attach_quantizers`."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from sparsebit.graph.ops.op_rows import OpRow


@dataclass(frozen=True)
class AloneAt:
    """A separate quantizer in the graph, before the readers. `num_writes` into the tensor come before it."""

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
    """An op that holds its quantizers. `node`: None outside graphs; `source`: what its input quantizer reads."""

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
