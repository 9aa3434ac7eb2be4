"""`CapturedGraph`: a GraphModule that stays tied to the module it was traced from, and that can be copied and pickled.

torch.fx pickles a graph as Python source and traces that again, which loses what a plain trace cannot see (guards,
training flags, factories). Here the nodes themselves are stored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

_REGISTRIES = ("_parameters", "_buffers", "_non_persistent_buffers_set")


class CapturedGraph(fx.GraphModule):
    """`source`'s forward as a graph.

    Leaves are the source's own modules, and parameters and buffers that the graph reads by themselves live in the same
    registries, so that `to`, `train` and `load_state_dict` reach both or neither.
    """

    def __init__(self, source: nn.Module, graph: fx.Graph) -> None:
        super().__init__(source, graph, type(source).__name__)
        # In a tuple: the source's leaves are the graph's, and must not be registered twice.
        self.__dict__["_source"] = (source,)
        for path in self._read_namespaces():
            share_registries(self.get_submodule(path), source.get_submodule(path))
        self._follow_modes()

    @property
    def source(self) -> nn.Module:
        source: nn.Module = self.__dict__["_source"][0]
        return source

    def train(self, mode: bool = True) -> CapturedGraph:
        super().train(mode)
        self.source.train(mode)  # last: it may keep parts of itself in eval mode
        self._follow_modes()
        return self

    def release_unread(self) -> None:
        """Let go of parameters and buffers whose readers were rewritten away."""
        read = self._read_namespaces()
        for path, module in self._namespaces():
            if path not in read:
                module.__dict__.update(_parameters={}, _buffers={}, _non_persistent_buffers_set=set())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CapturedGraph:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # What only the source's code uses moves along; a second move of the rest changes nothing.
        self.source._apply(fn)
        return self

    def _namespaces(self) -> list[tuple[str, nn.Module]]:
        """Modules that stand for a path and compute nothing, this one first."""
        return [(path, module) for path, module in self.named_modules() if module is self or type(module) is nn.Module]

    def _read_namespaces(self) -> set[str]:
        return {str(node.target).rpartition(".")[0] for node in self.graph.nodes if node.op == "get_attr"}

    def _follow_modes(self) -> None:
        modes = {path: module.training for path, module in self.source.named_modules(remove_duplicate=False)}
        for path, module in self._namespaces():
            module.training = modes.get(path, module.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedGraph:
        copied = _restored(copy.deepcopy(self._state(), memo), type(self).__name__, _to_rows(self.graph))
        memo[id(self)] = copied
        for node, twin in zip(self.graph.nodes, copied.graph.nodes, strict=True):
            twin.meta = dict(node.meta)
            memo[id(node)] = twin  # who holds a node by itself holds the copy's
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._state(), type(self).__name__, _to_rows(self.graph))

    def _state(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_graph"}


def share_registries(module: nn.Module, owner: nn.Module) -> None:
    """From now on both hold the same parameters and buffers, also after one of them rebinds a name (`.to`)."""
    if module is owner:
        return
    for name in [name for name in module._buffers if name not in owner._buffers]:
        # A constant, or a tensor that is a plain attribute: no state of the model, but it moves with it.
        owner.__dict__.pop(name, None)
        owner.register_buffer(name, module._buffers[name], persistent=False)
    for registry in _REGISTRIES:
        module.__dict__[registry] = owner.__dict__[registry]


@dataclass(frozen=True)
class _Reference:
    """The node of that number."""

    index: int


def _to_rows(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """The nodes as plain values, in order."""
    number = {node: index for index, node in enumerate(graph.nodes)}

    def refer(item: Any) -> Any:
        return _Reference(number[item]) if isinstance(item, fx.Node) else item

    def plain(arguments: Any) -> Any:
        return map_aggregate(arguments, refer)

    return [(node.op, node.target, plain(node.args), plain(node.kwargs), node.name, node.type) for node in graph.nodes]


def _restored(state: dict[str, Any], class_name: str, rows: list[tuple[Any, ...]]) -> CapturedGraph:
    nodes: list[fx.Node] = []

    def real(arguments: Any) -> Any:
        return map_aggregate(arguments, lambda item: nodes[item.index] if isinstance(item, _Reference) else item)

    graph = fx.Graph()
    for op, target, args, kwargs, name, kind in rows:
        nodes.append(graph.create_node(op, target, real(args), real(kwargs), name, kind))
    module = CapturedGraph.__new__(CapturedGraph)
    module.__dict__.update(state)
    type(module).__name__ = class_name
    module.graph = graph
    return module
