"""`Block`: consecutive nodes of a graph, with the values that cross its border.

`named_blocks` cuts a graph at modules that the caller names, `single_layers` at every call of a module,
`whole_graph` nowhere, and `find_blocks` (in `search.py`) where few tensors cross. `Flow` knows for a graph who reads
each value, and which values share memory that is written: a block's outputs include inputs that it writes into.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import fx, nn

from sparsebit.config.selectors import near_names
from sparsebit.errors import ConfigError
from sparsebit.graph.nodes.aliasing import Families, may_alias, written_by
from sparsebit.graph.nodes.graph_module import source_path
from sparsebit.graph.nodes.node_names import node_name


@dataclass(frozen=True)
class Block:
    """Consecutive nodes of one graph that are run and changed together.

    `inputs`: values that it reads and that earlier nodes compute. `outputs`: values that it computes or writes into,
    and that a later node reads; the graph's output counts. `written`: inputs that it writes into.
    """

    name: str
    nodes: tuple[fx.Node, ...] = field(repr=False)
    inputs: tuple[fx.Node, ...] = ()
    outputs: tuple[fx.Node, ...] = ()
    written: tuple[fx.Node, ...] = ()

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules that its nodes call, by their path in the graph module."""
        root = self.nodes[0].graph.owning_module
        assert root is not None, "the graph belongs to no module"
        paths = (str(node.target) for node in self.nodes if node.op == "call_module")
        return {path: root.get_submodule(path) for path in paths}


class Flow:
    """The nodes that compute and read each value of a graph, and which values may share memory that is written."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module
        self.position = {node: index for index, node in enumerate(graph_module.graph.nodes)}
        # Parameters and buffers are read from the module; inputs and the output are not part of any block.
        self.nodes = [n for n in self.position if n.op not in ("placeholder", "get_attr", "output")]
        self.last_read = {n: max((self.position[user] for user in n.users), default=-1) for n in self.position}
        families, self._written_by = Families(), {}
        for node in self.position:
            for other in may_alias(node, graph_module):
                families.join(node, other)
            self._written_by[node] = written_by(node, graph_module)
        self._families = families

    def written(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """The values whose memory the nodes write into: those overwritten, and whatever may share memory with them."""
        sources = (source for node in nodes for source in self._written_by[node])
        return {member for source in sources for member in self._families.of(source)}

    def shares(self, node: fx.Node) -> set[fx.Node]:
        """The values that may share memory with the node's, itself among them."""
        return self._families.of(node)

    def block(self, name: str, nodes: Sequence[fx.Node]) -> Block:
        """The nodes as a block, with its border."""
        own = set(nodes)
        end = self.position[nodes[-1]]
        read = {source for node in nodes for source in node.all_input_nodes if source not in own}
        inputs = sorted((n for n in read if n.op != "get_attr"), key=self.position.__getitem__)
        written = self.written(nodes)
        overwritten = [n for n in inputs if n in written]
        outputs = [n for n in (*overwritten, *nodes) if self.last_read[n] > end]
        return Block(name, tuple(nodes), tuple(inputs), tuple(outputs), tuple(overwritten))


def named_blocks(graph_module: fx.GraphModule, names: Sequence[str]) -> list[Block]:
    """A block for each module path, in the order of the graph.

    A module's nodes must follow each other. Nodes that a pass inserted next to them (for example a quantizer of a
    tensor that several ops read) belong to the block that alone reads them, else to the one that computes their inputs.
    """
    flow = Flow(graph_module)
    owners = {node: _owner(node, names) for node in flow.nodes}
    spans = [_span(flow, name, owners) for name in dict.fromkeys(names)]
    spans.sort()
    blocks = []
    for index, (start, stop, name) in enumerate(spans):
        floor = spans[index - 1][1] if index else 0
        if start < floor:
            raise ConfigError(f"blocks {spans[index - 1][2]!r} and {name!r} overlap; name one of them")
        ceiling = spans[index + 1][0] if index + 1 < len(spans) else len(flow.nodes)
        # Extend the span by inserted nodes before it and after it.
        while start > floor and _is_read_within(flow, start - 1, stop):
            start -= 1
        while stop < ceiling and _reads_only(flow, stop, start) and not _is_read_by(flow, stop, spans[index + 1 :]):
            stop += 1
        spans[index] = (start, stop, name)
        blocks.append(flow.block(name, flow.nodes[start:stop]))
    return blocks


def single_layers(
    graph_module: fx.GraphModule, wanted: Callable[[nn.Module], bool] = lambda module: True
) -> list[Block]:
    """A block for each call of a module that is `wanted`; a module that is called twice has two."""
    flow = Flow(graph_module)
    calls = [node for node in flow.nodes if node.op == "call_module"]
    layers = [node for node in calls if wanted(graph_module.get_submodule(str(node.target)))]
    return uniquely_named([flow.block(node_name(node), [node]) for node in layers])


def whole_graph(graph_module: fx.GraphModule, name: str = "network") -> list[Block]:
    """All nodes as one block."""
    flow = Flow(graph_module)
    return [flow.block(name, flow.nodes)]


def with_gaps(flow: Flow, blocks: Sequence[Block]) -> list[tuple[Block, bool]]:
    """The blocks and, as blocks without a name, the nodes between them: (block, whether it is one of `blocks`).

    Nodes after the last block are left out.
    """
    index = {node: number for number, node in enumerate(flow.nodes)}
    parts: list[tuple[Block, bool]] = []
    reached = 0
    for block in blocks:
        start = index.get(block.nodes[0], -1)
        if start < reached or list(block.nodes) != flow.nodes[start : start + len(block.nodes)]:
            raise ConfigError(
                f"block {block.name!r} is not of this graph as it is now, overlaps another or is out of order; find "
                "the blocks after the last change of the graph, and give them in its order"
            )
        if start > reached:
            parts.append((flow.block("", flow.nodes[reached:start]), False))
        parts.append((block, True))
        reached = start + len(block.nodes)
    return parts


def uniquely_named(blocks: Iterable[Block]) -> list[Block]:
    """The blocks; further ones of the same name are called `name:1`, `name:2`, …"""
    counts: Counter[str] = Counter()
    found = []
    for block in blocks:
        number = counts[block.name]
        counts[block.name] += 1
        found.append(replace(block, name=f"{block.name}:{number}") if number else block)
    return found


def is_inserted(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    """Whether a pass inserted the node: it calls a module that the traced model does not have under any name."""
    source = getattr(graph_module, "source", None)
    if source is None or node.op != "call_module" or node_name(node) != source_path(str(node.target)):
        return False
    try:
        source.get_submodule(source_path(str(node.target)))
    except AttributeError:
        return True
    return False


def _owner(node: fx.Node, names: Sequence[str]) -> str | None:
    own = node_name(node)
    found = [name for name in names if own == name or own.startswith(f"{name}.")]
    if len(set(found)) > 1:
        raise ConfigError(f"blocks {found[0]!r} and {found[1]!r}: one is inside the other; name one of them")
    return found[0] if found else None


def _span(flow: Flow, name: str, owners: dict[fx.Node, str | None]) -> tuple[int, int, str]:
    """The positions of the module's nodes in `flow.nodes`: the first, and one after the last."""
    own = [index for index, node in enumerate(flow.nodes) if owners[node] == name]
    if not own:
        prefixes = {".".join(parts[:n]) for parts in (node_name(x).split(".") for x in flow.nodes) for n in range(1, 9)}
        near = ", ".join(near_names(name, sorted(prefixes))) or "none"
        raise ConfigError(f"block {name!r}: no node of the graph belongs to a module of that path; near names: {near}")
    for index in range(own[0], own[-1]):
        node = flow.nodes[index]
        if owners[node] != name and not is_inserted(node, flow.graph_module):
            raise ConfigError(
                f"block {name!r}: its nodes are not neighbours, {node_name(node)!r} runs between them (the module is "
                "called more than once, or shares a layer with another); name a module that holds both, or leave it out"
            )
    return own[0], own[-1] + 1, name


def _is_read_within(flow: Flow, index: int, stop: int) -> bool:
    """Whether only the next block reads the inserted node at `index`."""
    node = flow.nodes[index]
    last = flow.position[flow.nodes[stop - 1]]
    return is_inserted(node, flow.graph_module) and flow.last_read[node] <= last


def _reads_only(flow: Flow, index: int, start: int) -> bool:
    node = flow.nodes[index]
    first = flow.position[flow.nodes[start]]
    return is_inserted(node, flow.graph_module) and all(flow.position[n] >= first for n in node.all_input_nodes)


def _is_read_by(flow: Flow, index: int, spans: Sequence[tuple[int, int, str]]) -> bool:
    """Whether the inserted node at `index` is the value that only the next block reads."""
    return (
        bool(spans)
        and all(is_inserted(flow.nodes[between], flow.graph_module) for between in range(index, spans[0][0]))
        and _is_read_within(flow, index, spans[0][1])
    )
