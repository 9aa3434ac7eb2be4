"""`SharedWeights`: the original values of weights that more than one block uses.

When the second block is reached, a visit of the first has changed them, but the float model has not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor, fx, nn

from sparsebit.execution.blocks.find_blocks import Block

# A registry of a module (its parameters or buffers), and the name in it.
Place = tuple[dict[str, Tensor | None], str]


class SharedWeights:
    """`parts`: the blocks in order. Only tensors that a later part uses too are copied."""

    def __init__(self, graph_module: fx.GraphModule, parts: Sequence[Block]) -> None:
        places = {part: _places(graph_module, part) for part in parts}
        users: dict[int, list[int]] = {}
        for number, part in enumerate(parts):
            for tensor in {id(t) for registry, name in places[part] if (t := registry[name]) is not None}:
                users.setdefault(tensor, []).append(number)
        shared = {tensor for tensor, numbers in users.items() if len(numbers) > 1}
        self._shared = {part: [(r, n) for r, n in held if id(r[n]) in shared] for part, held in places.items()}
        self._parts = list(parts)
        # Per place, as ids, since a place may hold another object later.
        self._originals: dict[tuple[int, str], Tensor] = {}

    def keep(self, number: int) -> None:
        """Called before part `number` is visited: keep the current values that later parts need."""
        here = {id(r[n]): r[n] for r, n in self._shared[self._parts[number]]}
        copies: dict[int, Tensor] = {}
        for part in self._parts[number + 1 :]:
            for registry, name in self._shared[part]:
                tensor = registry.get(name)
                if tensor is not None and id(tensor) in here and (id(registry), name) not in self._originals:
                    copies.setdefault(id(tensor), _copy(tensor))
                    self._originals[id(registry), name] = copies[id(tensor)]

    @contextlib.contextmanager
    def original(self, block: Block) -> Iterator[None]:
        """Inside, the block's shared weights are those of the float model."""
        wanted = [(r, n, self._originals[id(r), n]) for r, n in self._shared[block] if (id(r), n) in self._originals]
        now = [(registry, name, registry[name]) for registry, name, _ in wanted if name in registry]
        for registry, name, original in wanted:
            if name in registry:
                registry[name] = original
        try:
            yield
        finally:
            for registry, name, tensor in now:
                registry[name] = tensor


def _places(graph_module: fx.GraphModule, part: Block) -> list[Place]:
    """The places of the block's parameters and buffers."""
    modules = {inner: None for module in part.modules.values() for inner in module.modules()}
    places = [(registry, name) for m in modules for registry in (m._parameters, m._buffers) for name in registry]
    for node in part.nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                path, _, name = str(source.target).rpartition(".")
                module = graph_module.get_submodule(path)
                places += [(r, name) for r in (module._parameters, module._buffers) if name in r]
    return places  # type: ignore[return-value]


def _copy(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
