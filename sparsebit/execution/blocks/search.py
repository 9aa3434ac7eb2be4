"""`find_blocks`: cut a graph into blocks where few tensors cross.

1. A cut is a place between two nodes that one tensor crosses. The nodes between two cuts are a region: a plain layer,
   or a residual block, since its shortcut crosses every place inside it.
2. Some values live long: a U-Net's skips, a mask that every layer reads. They would join all layers to one region. So a
   region of more than `_LARGEST` layers is cut again as if its longest-lived value did not cross, repeatedly.
3. Regions without weights (activations, poolings) are joined to the region before them.
4. Regions of one repeated module (the attention and the MLP of a transformer layer) are joined to one block.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import fx, nn

from sparsebit.execution.blocks.find_blocks import Block, Flow, is_inserted, named_blocks, uniquely_named
from sparsebit.graph.nodes.graph_module import source_path
from sparsebit.graph.nodes.node_names import node_name
from sparsebit.graph.nodes.value_kinds import static_values

# Layers that a shortcut may span before it counts as a long-lived value: a decoder layer of T5 has 11, a block of
# Inception 10.
_LARGEST = 12
# Functions that make a parameter of two or more dimensions a weight; a position table, which is added, is not one.
_PRODUCTS = {
    "addmm", "baddbmm", "bilinear", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "einsum", "embedding", "linear", "matmul", "mm", "tensordot",
}  # fmt: skip
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
Span = tuple[int, int]


def find_blocks(graph_module: fx.GraphModule, names: Sequence[str] | None = None) -> list[Block]:
    """The graph as a sequence of blocks: the modules at the paths `names`, or blocks that are searched.

    Searched blocks contain every node that computes. The nodes between named ones are in no block; the engine runs
    them too. Residual blocks and transformer layers become one block each, plain layers one each, with the
    activations and poolings that follow.
    """
    if names is not None:
        return named_blocks(graph_module, names)
    search = _Search(graph_module)
    spans = search.joined(search.regions(0, len(search.nodes), frozenset()))
    return uniquely_named(search.flow.block(search.name(span), search.nodes[slice(*span)]) for span in spans)


class _Search:
    """Spans are (start, stop) in `nodes`; a place `i` is the one before node `i`."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.flow, self.graph_module = Flow(graph_module), graph_module
        self.nodes = self.flow.nodes
        self.index = {node: number for number, node in enumerate(self.nodes)}
        self.is_weighted = [self._has_matrix(node) for node in self.nodes]
        self._lives = self._lifetimes()
        self._written = self.flow.written(self.nodes)

    def regions(self, start: int, stop: int, carried: frozenset[fx.Node]) -> Iterator[Span]:
        """The span, cut at places that only one value besides the carried ones crosses."""
        crossing = self._crossing(start, stop)
        places = [i for i in range(start + 1, stop) if self._is_cut(crossing[i - start], carried)]
        for low, high in itertools.pairwise([start, *places, stop]):
            inside = {value for place in range(low + 1, high) for value in crossing[place - start]} - carried
            if sum(self.is_weighted[low:high]) > _LARGEST and inside:
                life = {value: self._lives[value][1] - self._lives[value][0] for value in inside}
                longest = max(inside, key=lambda value: (life[value], -self.flow.position[value]))
                yield from self.regions(low, high, carried | {longest})
            else:
                yield low, high

    def joined(self, regions: Iterable[Span]) -> list[Span]:
        """Join regions without weights to their neighbours, and the regions of one repeated module to each other."""
        repeated = self._repeated_modules()
        owners = [next((p for p in repeated if node_name(n).startswith(f"{p}.")), None) for n in self.nodes]
        spans: list[Span] = []
        owner: str | None = None  # of the last span
        waiting: int | None = None  # start of inserted nodes that are joined to the next region
        for start, stop in regions:
            traced = [i for i in range(start, stop) if not is_inserted(self.nodes[i], self.graph_module)]
            if not traced and stop < len(self.nodes):
                waiting = start if waiting is None else waiting
                continue
            own = owners[traced[0]] if traced else None
            start, waiting = (start, None) if waiting is None else (waiting, None)
            has_weights = self._has_weights((start, stop))
            is_same = own == owner and (own is not None or not (spans and has_weights and self._has_weights(spans[-1])))
            if spans and (is_same or (own is None and not has_weights)):
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((start, stop))
                owner = own
        return self._without_weightless(spans)

    def _without_weightless(self, spans: list[Span]) -> list[Span]:
        """Join spans without weights to the one before; the first to the one after it."""
        found: list[Span] = []
        for start, stop in spans:
            if found and not (self._has_weights((start, stop)) and self._has_weights(found[-1])):
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
        return found

    def name(self, span: Span) -> str:
        """A name for the span: the path that all weighted nodes share, or else the first and the last of them."""
        own = [i for i in range(*span) if self.is_weighted[i]] or list(range(*span))
        names = [node_name(self.nodes[i]) for i in own]
        if len(set(names)) == 1:
            return names[0]
        parts = zip(*(name.split(".") for name in names), strict=False)
        shared = [part[0] for part in itertools.takewhile(lambda part: len(set(part)) == 1, parts)]
        return ".".join(shared) or f"{names[0]}..{names[-1]}"

    # --- what crosses

    def _lifetimes(self) -> dict[fx.Node, Span]:
        """Per value that depends on inputs: the first and the last place that it crosses.

        An input of the graph exists all the time; it counts from its first reader on.
        """
        static = static_values(self.flow.graph_module.graph)
        found = {}
        for value in self.flow.position:
            readers = [self.index[user] for user in value.users if user in self.index]
            if any(user.op == "output" for user in value.users):
                readers.append(len(self.nodes))
            if value in static or value.op in ("get_attr", "output") or not readers:
                continue
            found[value] = (self.index[value] + 1 if value in self.index else min(readers) + 1, max(readers))
        return found

    def _crossing(self, start: int, stop: int) -> list[set[fx.Node]]:
        """The values that cross each place of the span."""
        crossing: list[set[fx.Node]] = [set() for _ in range(stop - start + 1)]
        for value, (first, last) in self._lives.items():
            for place in range(max(first, start), min(last, stop) + 1):
                crossing[place - start].add(value)
        return crossing

    def _is_cut(self, crossing: set[fx.Node], carried: frozenset[fx.Node]) -> bool:
        if len(crossing - carried) > 1:
            return False
        # Two values that share written memory cannot be kept separately.
        shared = crossing & self._written
        return not any(len(self.flow.shares(value) & shared) > 1 for value in shared)

    # --- what belongs together

    def _has_matrix(self, node: fx.Node) -> bool:
        """Whether the node has weights of two or more dimensions: norms and biases do not count."""
        if node.op == "call_module":
            return any(p.dim() > 1 for p in self.graph_module.get_submodule(str(node.target)).parameters())
        if str(getattr(node.target, "__name__", node.target)) not in _PRODUCTS:
            return False
        read = (source for source in node.all_input_nodes if source.op == "get_attr")
        return any(_is_matrix(self.graph_module, str(source.target)) for source in read)

    def _repeated_modules(self) -> list[str]:
        """The paths of repeated modules, such as transformer layers.

        These are the outermost modules in a container (`nn.ModuleList`) that do not themselves hold repeated modules.
        """
        source = getattr(self.graph_module, "source", None)
        if source is None:
            return []
        called = {source_path(str(node.target)) for node in self.nodes if node.op == "call_module"}
        found: list[str] = []
        for path, module in source.named_modules():
            is_below = any(path.startswith(f"{other}.") for other in found)
            if path in called or is_below or not _is_composed(module):
                continue
            parent = source.get_submodule(path.rpartition(".")[0]) if path else None
            if isinstance(parent, _CONTAINERS) and not _holds_repeated(module, path, called):
                found.append(path)
        return found

    def _has_weights(self, span: Span) -> bool:
        return any(self.is_weighted[slice(*span)])


def _holds_repeated(module: nn.Module, path: str, called: set[str]) -> bool:
    """Whether a container inside holds several modules of one class that are larger than a layer."""
    for inner, container in module.named_modules():
        if isinstance(container, _CONTAINERS) and f"{path}.{inner}" not in called:
            own = (child for name, child in container.named_children() if f"{path}.{inner}.{name}" not in called)
            kinds = Counter(type(child) for child in own if _is_composed(child))
            if any(count > 1 for count in kinds.values()):
                return True
    return False


def _is_composed(module: nn.Module) -> bool:
    return not isinstance(module, _CONTAINERS) and any(True for _ in module.children())


def _is_matrix(graph_module: fx.GraphModule, target: str) -> bool:
    path, _, name = target.rpartition(".")
    value = getattr(graph_module.get_submodule(path), name, None)
    return isinstance(value, nn.Parameter) and value.dim() > 1
