"""Where the sites of a plan lie in the captured graphs: the planner's second result, used up by `attach_quantizers`."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from sparsebit.graph.ops.op_rows import OpRow


@dataclass(frozen=True)
class AloneAt:
    """A quantizer of its own in the graph, in front of the readers. `num_writes` into the tensor come before it."""

    site: str
    source: fx.Node
    readers: tuple[fx.Node, ...]
    num_writes: int = 0
    is_output: bool = False


@dataclass(frozen=True)
class SharedAt:
    """Readers of a tensor that lies on the grid of another site, `owner`: nothing is rounded."""

    name: str
    owner: str
    source: fx.Node
    readers: tuple[fx.Node, ...]


@dataclass(frozen=True)
class InsideOf:
    """An op that holds its quantizers; a role without a site is in float.

    `node` is None for a layer outside graphs; `source`: whose value its input quantizer reads.
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
    """Of one captured graph. `tensors`: in the order in which they are put in."""

    tensors: list[AloneAt | SharedAt] = field(default_factory=list)
    ops: list[InsideOf] = field(default_factory=list)


@dataclass
class Placement:
    """Of the whole model: each captured graph, and each layer that no graph holds, by their paths."""

    regions: dict[str, RegionPlacement] = field(default_factory=dict)
    loose: dict[str, InsideOf] = field(default_factory=dict)
