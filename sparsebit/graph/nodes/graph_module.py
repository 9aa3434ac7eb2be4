"""`CapturedGraph`: a GraphModule that stays tied to the module it was traced from, and that can be copied and pickled.

The tie: leaves are the same module objects, and tensors that the graph reads directly live in the same registries
(`_parameters`, `_buffers`). So `to`, `train` and `load_state_dict` of one reach both, and the source's own code can
run at any time. A module that only the source's code uses is held here as well once `keep_uncalled` was called.

torch.fx pickles a graph as Python source and traces that again, which loses what a plain trace cannot see (guards,
training flags, factories). Here the nodes themselves are stored.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from sparsebit.graph.nodes.absorbed import Absorbed
from sparsebit.graph.nodes.captured_block import (
    GRAPH_MODULE_NAMES,
    CapturedBlock,
    OfSource,
    mark_block,
    show_attributes_of,
)

_REGISTRIES = ("_parameters", "_buffers", "_non_persistent_buffers_set")
NAME_KEY = "sparsebit_name"  # the key in `node.meta` of the name from `node_names`


class CapturedGraph(OfSource, fx.GraphModule):
    """`source`'s forward as a graph.

    Leaves are the source's own modules, and parameters and buffers that the graph reads by themselves live in the same
    registries, so that `to`, `train` and `load_state_dict` reach both or neither. Children with a name that a
    GraphModule uses itself (`graph`, `code`) are registered as `user_graph`, `user_code`; `source_path` returns the
    original name.
    """

    def __init__(self, source: nn.Module, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr"):
                node.target = _graph_path(str(node.target), is_module=node.op == "call_module")
        super().__init__(_with_renamed_children(source), graph, type(source).__name__)
        # In a tuple, so that it is not a child: its leaves are registered in the graph already.
        self.__dict__["_source"] = (source,)
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr"):
                self._mark_blocks(node.target)
        for path in self._read_namespaces():
            share_registries(self.get_submodule(path), source.get_submodule(source_path(path)))
        self._follow_modes()

    @property
    def source(self) -> nn.Module:
        source: nn.Module = self.__dict__["_source"][0]
        return source

    def train(self, mode: bool = True) -> CapturedGraph:
        super().train(mode)
        self.source.train(mode)  # last, since the source may keep parts of itself in eval mode
        self._follow_modes()
        return self

    def rewrite_until_settled(self) -> None:
        """Until `settle` is called, a changed graph is compiled at its next call only: a build changes it often."""
        self.__dict__["_is_rewritten"] = True

    def settle(self) -> None:
        if self.__dict__.pop("_is_rewritten", False):
            self.recompile()

    def recompile(self) -> Any:
        """As in torch.fx, but without its `__call__`, which prints a traceback for every error inside the graph.

        A guard that fails is such an error, and is expected.
        """
        if self.__dict__.get("_is_rewritten", False):
            type(self).forward = _compile_and_run
            return None
        code = super().recompile()
        if "__call__" in vars(type(self)):
            del type(self).__call__
        return code

    def add_submodule(self, target: str, m: nn.Module) -> bool:
        added = super().add_submodule(target, m)
        self._mark_blocks(target)
        return added

    def release_unread(self) -> None:
        """Remove parameters and buffers that no node reads any more."""
        read = self._read_namespaces()
        for path, module in self._namespaces():
            if path not in read:
                module.__dict__.update(_parameters={}, _buffers={}, _non_persistent_buffers_set=set())
        if self.__dict__.get("_keeps_uncalled", False):
            self.keep_uncalled()

    def keep_uncalled(self) -> None:
        """From now on hold modules and tensors that only the source's own code reads, as that may run, too."""
        self.__dict__["_keeps_uncalled"] = True
        _hold(self, self.source, {id(tensor) for tensor in _tensors_of(self)})
        new_names = self.meta.setdefault("new_attributes", [])
        for path, block in self._namespaces():
            with contextlib.suppress(AttributeError):  # a block that a pass has made has no counterpart in the source
                show_attributes_of(block, self.source.get_submodule(source_path(path)), new_names)

    def note_leaves(self) -> None:
        """Remember which modules the graph and the source both call: from now on a replaced one is replaced in both."""
        found = []
        for target in {str(node.target): None for node in self.graph.find_nodes(op="call_module")}:
            path, _, name = source_path(target).rpartition(".")
            with contextlib.suppress(AttributeError):
                parent, module = self.source.get_submodule(path), self.get_submodule(target)
                if parent._modules.get(name) is module:
                    found.append((target, parent, name, module))
        self.__dict__["_leaves"] = found

    def update_source(self) -> None:
        """Put modules that a user has replaced in the graph (`graph_module.conv = other`) into the source, too."""
        for target, parent, name, module in self.__dict__.get("_leaves", ()):
            with contextlib.suppress(AttributeError):  # the user has deleted it
                current = self.get_submodule(target)
                if current is not module and parent._modules.get(name) is module:
                    setattr(parent, name, current)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CapturedGraph:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Moves what only the source's code uses; for shared tensors it is a second move, which changes nothing.
        self.source._apply(fn)
        return self

    def _namespaces(self) -> list[tuple[str, nn.Module]]:
        """The blocks that only hold others under a path, this module first; called modules are not entered."""
        found: list[tuple[str, nn.Module]] = [("", self)]
        for path, module in found:
            below = [(f"{path}.{name}" if path else name, child) for name, child in module._modules.items()]
            found.extend((name, child) for name, child in below if isinstance(child, CapturedBlock))
        return found

    def _mark_blocks(self, target: str) -> None:
        """Make the plain modules that torch.fx creates along the path of a target CapturedBlocks."""
        module: nn.Module = self
        parts = target.split(".")[:-1]
        for end, name in enumerate(parts, start=1):
            child = module._modules.get(name)
            if type(child) is nn.Module and "forward" not in child.__dict__:
                mark_block(child, source_path(".".join(parts[:end])))
            if not isinstance(child, CapturedBlock):
                return
            module = child

    def _read_namespaces(self) -> set[str]:
        return {str(node.target).rpartition(".")[0] for node in self.graph.find_nodes(op="get_attr")}

    def _follow_modes(self) -> None:
        modes = {path: module.training for path, module in self.source.named_modules(remove_duplicate=False)}
        for path, module in self._namespaces():
            module.training = modes.get(source_path(path), module.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedGraph:
        copied = _restored(copy.deepcopy(self._state(), memo), type(self).__name__, _to_rows(self.graph))
        memo[id(self)] = copied
        for node, twin in zip(self.graph.nodes, copied.graph.nodes, strict=True):
            twin.meta = dict(node.meta)
            memo[id(node)] = twin  # a value that is a single node is the copy's node
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._state(), type(self).__name__, _to_rows(self.graph))

    def _state(self) -> dict[str, Any]:
        # A forward set on the instance, as training does, is not copied either.
        return {name: value for name, value in self.__dict__.items() if name not in ("_graph", "forward")}


def _compile_and_run(self: CapturedGraph, *args: Any, **kwargs: Any) -> Any:
    self.settle()
    self.rewrite_until_settled()
    return type(self).forward(self, *args, **kwargs)


_RESERVED = GRAPH_MODULE_NAMES | {
    *("source", "release_unread", "keep_uncalled", "note_leaves", "update_source", "self"),
    *("rewrite_until_settled", "settle", "_source", "_leaves", "_keeps_uncalled", "_is_rewritten"),
}
_PREFIX = "user_"


def source_path(target: str) -> str:
    """A node's target as the path in the module that was traced."""
    first, dot, rest = target.partition(".")
    return f"{first.removeprefix(_PREFIX)}{dot}{rest}" if _is_taken(first) else target


def _graph_path(path: str, is_module: bool) -> str:
    """The path in a graph of the module or tensor at `path` in the source."""
    first, dot, _ = path.partition(".")
    if not _is_taken(first) or path == "training":
        return path
    if not dot and not is_module:
        raise fx.proxy.TraceError(f"its tensor {first!r} has a name that torch.fx.GraphModule uses itself")
    return f"{_PREFIX}{path}"


def _is_taken(name: str) -> bool:
    """Whether a GraphModule uses the name itself, or the name looks like one that was renamed (`user_graph`)."""
    while name not in _RESERVED and name.startswith(_PREFIX):
        name = name.removeprefix(_PREFIX)
    return name in _RESERVED


def _with_renamed_children(source: nn.Module) -> nn.Module:
    """`source` with its children under the names that they have in a graph."""
    if not any(_is_taken(name) for name in source._modules):
        return source
    renamed = nn.Module()
    renamed.__dict__.update(source.__dict__)
    renamed._modules = {_graph_path(name, is_module=True): child for name, child in source._modules.items()}
    return renamed


def share_registries(module: nn.Module, owner: nn.Module) -> None:
    """From now on both hold the same parameters and buffers, also after one of them rebinds a name (`.to`)."""
    if module is owner:
        return
    for name in [name for name in module._buffers if name not in owner._buffers]:
        # A constant, or a tensor that is a plain attribute: not part of the state_dict, but it must move with `.to`.
        owner.__dict__.pop(name, None)
        owner.register_buffer(name, module._buffers[name], persistent=False)
    for registry in _REGISTRIES:
        module.__dict__[registry] = owner.__dict__[registry]


def _hold(block: nn.Module, source: nn.Module, held: set[int]) -> None:
    """Register in `block` the parts of `source` with tensors that are not among those `held` (by id)."""
    if any(id(tensor) not in held for tensor in _tensors_of(source, inside=False)):
        share_registries(block, source)
    for name, child in source._modules.items():
        renamed = _graph_path(name, is_module=True) if isinstance(block, CapturedGraph) else name
        own = block._modules.get(renamed)
        if child is None or own is child:
            continue
        if isinstance(own, CapturedBlock):
            _hold(own, child, held)
        elif own is None and any(id(tensor) not in held for tensor in _tensors_of(child)):
            block._modules[renamed] = child


def _tensors_of(module: nn.Module, *, inside: bool = True) -> list[Tensor]:
    """The parameters and buffers of the module and of all inside, except those of absorbed modules."""
    if inside and isinstance(module, Absorbed):
        return []
    own = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
    children = [child for child in module._modules.values() if child is not None and inside]
    return [*own, *(tensor for child in children for tensor in _tensors_of(child))]


@dataclass(frozen=True)
class _Reference:
    """Takes the place of a node in saved arguments: the node with this number."""

    index: int


def _to_rows(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """The nodes as plain values, in order."""
    number = {node: index for index, node in enumerate(graph.nodes)}

    def plain(arguments: Any) -> Any:
        return fx.map_arg(arguments, lambda node: _Reference(number[node]))  # type: ignore[arg-type, return-value]

    return [
        (node.op, node.target, plain(node.args), plain(node.kwargs), node.name, node.type, node.meta.get(NAME_KEY))
        for node in graph.nodes
    ]


def _restored(state: dict[str, Any], class_name: str, rows: list[tuple[Any, ...]]) -> CapturedGraph:
    nodes: list[fx.Node] = []

    def real(arguments: Any) -> Any:
        return map_aggregate(arguments, lambda item: nodes[item.index] if isinstance(item, _Reference) else item)

    graph = fx.Graph()
    for op, target, args, kwargs, name, kind, readable_name in rows:
        nodes.append(graph.create_node(op, target, real(args), real(kwargs), name, kind))
        if readable_name is not None:
            nodes[-1].meta[NAME_KEY] = readable_name
    module = CapturedGraph.__new__(CapturedGraph)
    module.__dict__.update(state)
    type(module).__name__ = class_name
    module.graph = graph
    return module


def module_of(node: fx.Node, root: fx.GraphModule) -> nn.Module | None:
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None
