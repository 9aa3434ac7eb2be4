"""`run_blocks`: block by block instead of batch by batch, with every value kept only until its last reader.

Two streams of values run next to each other: those of the float model ("float"), and those of the model with the
preceding blocks in their current state, quantized or pruned ("changed"). For each block in order, `_Run.through`
computes its float outputs for all batches, calls the visitor, and computes its outputs in the new state. Only the
values that cross from one block to the next are kept, in a store with a budget, and only until their last reader, so
memory does not grow with the number of batches. The model is never copied.

It knows neither quantization nor pruning: `quantization/calibrating/block_visits.py` and the sparse methods say what
"float" means (`as_float`) and what a visit does.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from sparsebit.errors import ConfigError
from sparsebit.execution.blocks.find_blocks import Block, Flow, with_gaps
from sparsebit.execution.blocks.resume import InputsOf, Resume
from sparsebit.execution.blocks.runner import BlockRunner, Values
from sparsebit.execution.blocks.value_store import SharedData
from sparsebit.graph.values.inference_mode import as_ordinary
from sparsebit.graph.values.nested import map_nested, tensors_of
from sparsebit.progress import track

log = logging.getLogger(__name__)

Stream = Literal["float", "changed"]
AsFloat = Callable[[Block], AbstractContextManager[Any]]
# A registry of a module (its parameters or buffers), and the name in it.
_Place = tuple[dict[str, Tensor | None], str]


class BatchValues:
    """A sequence with one tuple of values for each batch, read from the store on access."""

    def __init__(self, num_batches: int, get: Callable[[int], Values]) -> None:
        self._num_batches, self._get = num_batches, get

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index: int) -> Values:
        if not -self._num_batches <= index < self._num_batches:
            raise IndexError(index)
        return self._get(index % self._num_batches)

    def __iter__(self) -> Iterator[Values]:
        return map(self._get, range(self._num_batches))

    def part(self, batches: range) -> BatchValues:
        """The values of a range of batches."""
        return BatchValues(len(batches), lambda index: self._get(batches[index]))


class BlockData:
    """The argument of a visitor: the block, and its values of each batch.

    `inputs`: from the preceding blocks in their current state, `float_inputs`: from the float model; tuples in the
    order of `block.inputs`. `targets`: the float model's values, in the order of `block.outputs`. The tensors may be
    the stored ones: write into a copy. `held_out`: the same for the samples that must not be learned from, if there are
    some (on any rank; on this one there may be none). `batches`: the numbers of these batches in the run.
    """

    def __init__(self, run: _Run, block: Block, batches: range, held_out: BlockData | None = None) -> None:
        self.block, self.batches, self.num_batches, self.held_out = block, batches, len(batches), held_out
        self._run, self._runner = run, run.runner(block)
        self.inputs = self._values("changed", block.inputs)

    @property
    def float_inputs(self) -> BatchValues:
        return self._float_values("float_inputs", self.block.inputs)

    @property
    def targets(self) -> BatchValues:
        return self._float_values("targets", self.block.outputs)

    def run(self, inputs: Values) -> Values:
        """Run the block in its current state on `inputs`; returns the values of `block.outputs`.

        Gradients follow torch's mode; they are on when a visitor is called. Inputs are never written into.
        """
        return self._runner(inputs)

    def outputs(self) -> Iterator[Values]:
        """`run` on `inputs` of each batch in turn."""
        return map(self.run, self.inputs)

    def seen_at(self, nodes: Sequence[fx.Node]) -> Callable[[Values], Values]:
        """`run`, but the result is `block.outputs` and then the values of these nodes of the block."""
        return self._run.runner(replace(self.block, outputs=(*self.block.outputs, *nodes)))

    @contextlib.contextmanager
    def in_float(self) -> Iterator[None]:
        """Inside, the block computes what it computes in the float model, as long as nothing has been learned yet."""
        run = self._run
        if run.as_float is None:
            raise ConfigError(f"block {self.block.name!r}: in_float() needs `as_float`; give it to run_blocks")
        with run.weights.original(self.block), run.as_float(self.block):
            yield

    def _values(self, stream: Stream, nodes: Sequence[fx.Node]) -> BatchValues:
        run = self._run
        return BatchValues(run.num_batches, lambda index: run.values(stream, nodes, index)).part(self.batches)

    def _float_values(self, what: str, nodes: Sequence[fx.Node]) -> BatchValues:
        if not self._run.has_float:
            raise ConfigError(f"block {self.block.name!r}: {what} need `as_float`; give it to run_blocks")
        return self._values("float", nodes)


Visit = Callable[[BlockData], None]


def run_blocks(
    graph_module: fx.GraphModule,
    blocks: Sequence[Block],
    num_batches: int,
    inputs_of: InputsOf,
    visit: Visit,
    *,
    as_float: AsFloat | None = None,
    store: SharedData | None = None,
    resume: Resume | None = None,
    num_held: int | None = None,
    what: str = "blocks",
) -> None:
    """Call `visit` for each block in order; nodes between the blocks run too, and are not visited.

    `inputs_of(i)`: the graph's inputs of batch i by name; a missing one has its default. `as_float(block)`: inside
    this context the block computes the same as in the float model, as far as switches decide; the engine restores
    weights that a visit changed earlier (in a layer that two blocks call). Without it, float values are not
    computed. `resume`: finished blocks are loaded instead of visited. `num_held`: this many of the last
    batches are `held_out` for visits; None: there are none on any rank.

    On several ranks each has its own batches, and visits merge what they gather (`sparsebit.execution.distributed`).
    """
    store = SharedData() if store is None else store
    # Values that are created in inference mode could never be part of a training step.
    with torch.inference_mode(False), torch.no_grad():
        run = _Run(graph_module, blocks, num_batches, as_float, store, num_held)
        if resume is not None:
            resume.start(graph_module, blocks, num_batches, inputs_of)
        try:
            run.put_inputs(inputs_of)
            run.through(visit, resume, what)
        finally:
            run.clear()


def mix(changed: Values, original: Values, share: float, generator: torch.Generator | None = None) -> Values:
    """`changed` with a random share of its elements taken from `original` (QDrop, section 3.3)."""
    others = iter(tensors_of(original))

    def mixed(one: Tensor) -> Tensor:
        other = next(others)
        if not one.is_floating_point():
            return one
        device = one.device if generator is None else generator.device
        chance = torch.rand(one.shape, generator=generator, device=device).to(one.device)
        return torch.where(chance < share, other, one)

    return tuple(map_nested(Tensor, mixed, value) for value in changed)


class _Run:
    """One run of the engine: the store, the values kept outside of it, and the last reader of each value."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        blocks: Sequence[Block],
        num_batches: int,
        as_float: AsFloat | None,
        store: SharedData,
        num_held: int | None,
    ) -> None:
        self.graph_module, self.num_batches, self.store, self.num_held = graph_module, num_batches, store, num_held
        self.as_float, self.has_float = as_float, as_float is not None
        self.flow = Flow(graph_module)
        self.parts = with_gaps(self.flow, blocks)
        self._written_inputs = {node for part, _ in self.parts for node in part.written}
        self.last_part = {node: number for number, (part, _) in enumerate(self.parts) for node in part.inputs}
        self.interpreter = fx.Interpreter(graph_module, garbage_collect_values=False)
        self.held: dict[tuple[Stream, fx.Node, int], Any] = {}
        # Values that share memory with other crossing values, and that a later block writes into. A store would copy
        # each of them, and a write would reach only one copy; so they are kept in memory as they are.
        written = self.flow.written(node for part, _ in self.parts for node in part.nodes) & self.last_part.keys()
        self.kept_whole = {node for node in written if len(self.flow.shares(node) & written) > 1}
        self.weights = _SharedWeights(graph_module, [part for part, _ in self.parts])

    # --- values

    def put_inputs(self, inputs_of: InputsOf) -> None:
        wanted = [node for node in self.graph_module.graph.find_nodes(op="placeholder") if node in self.last_part]
        for index in range(self.num_batches):
            given = inputs_of(index)
            for node in wanted:
                value = given.get(str(node.target), node.args[0] if node.args else None)
                for stream in self._streams(node):
                    self._put(stream, node, index, value)

    def values(self, stream: Stream, nodes: Sequence[fx.Node], index: int) -> Values:
        return tuple(self._get(stream, node, index) for node in nodes)

    def _streams(self, node: fx.Node) -> tuple[Stream, ...]:
        """The streams that store the value separately; an input of the graph is the same in both, unless written to."""
        if not self.has_float or (node.op == "placeholder" and node not in self._written_inputs):
            return ("changed",)
        return ("float", "changed")

    def _get(self, stream: Stream, node: fx.Node, index: int) -> Any:
        stream = stream if stream in self._streams(node) else "changed"
        if node in self.kept_whole:
            return self.held[stream, node, index]
        return self.store.get((stream, node, index))

    def _put(self, stream: Stream, node: fx.Node, index: int, value: Any) -> None:
        if node in self.kept_whole:
            # An input of the graph belongs to the caller, so it must not be written into.
            is_input = node.op == "placeholder" and (stream, node, index) not in self.held
            self.held[stream, node, index] = map_nested(Tensor, torch.clone, value) if is_input else value
        else:
            self.store.put((stream, node, index), as_ordinary(value))

    def _drop(self, node: fx.Node) -> None:
        for index in range(self.num_batches):
            for stream in ("float", "changed"):
                self.held.pop((stream, node, index), None)
                self.store.drop((stream, node, index))

    def clear(self) -> None:
        self.store.clear()
        self.held.clear()

    # --- blocks

    def runner(self, block: Block) -> BlockRunner:
        return BlockRunner(self.interpreter, block, self.flow.written(block.nodes))

    def through(self, visit: Visit, resume: Resume | None, what: str) -> None:
        progress = iter(track([part for part, is_visited in self.parts if is_visited], what))
        for number, (part, is_visited) in enumerate(self.parts):
            # The float outputs come before the visit, which changes the block's weights.
            if self.as_float is not None:
                with self.weights.original(part), self.as_float(part):
                    self._advance("float", part)
            if is_visited:
                next(progress)
                self.weights.keep(number)
                self._visit(part, visit, resume)
            if number < len(self.parts) - 1:  # nothing reads the last block's outputs
                self._advance("changed", part)
            for node in {*part.inputs, *part.outputs}:
                if self.last_part.get(node, -1) <= number:
                    self._drop(node)
        for _ in progress:
            pass

    def _visit(self, block: Block, visit: Visit, resume: Resume | None) -> None:
        if resume is not None and resume.load(block):
            return
        log.debug("block %s: %d nodes, %d batches", block.name, len(block.nodes), self.num_batches)
        border = self.num_batches - (self.num_held or 0)
        held = None if self.num_held is None else BlockData(self, block, range(border, self.num_batches))
        with torch.enable_grad():
            visit(BlockData(self, block, range(border), held))
        if resume is not None:
            resume.save(block)

    def _advance(self, stream: Stream, block: Block) -> None:
        """Compute the outputs of the block for every batch."""
        runner = self.runner(block)
        for index in range(self.num_batches):
            inputs = self.values(stream, block.inputs, index)
            outputs = runner(inputs, in_place=self.kept_whole, writes_buffers=stream == "changed")
            for node, value in zip(block.outputs, outputs, strict=True):
                if node in self.last_part or stream == "float":
                    self._put(stream, node, index, value)


class _SharedWeights:
    """The original values of weights that several of `parts`, the blocks in order, use.

    When the second block is reached, a visit of the first has changed them, but the float model needs the original
    ones. Only tensors that a later part uses as well are copied.
    """

    def __init__(self, graph_module: fx.GraphModule, parts: Sequence[Block]) -> None:
        places = {part: _places(graph_module, part) for part in parts}
        users: dict[int, list[int]] = {}
        for number, part in enumerate(parts):
            for tensor in {id(t) for registry, name in places[part] if (t := registry[name]) is not None}:
                users.setdefault(tensor, []).append(number)
        shared = {tensor for tensor, numbers in users.items() if len(numbers) > 1}
        self._shared = {part: [(r, n) for r, n in held if id(r[n]) in shared] for part, held in places.items()}
        self._parts = list(parts)
        # By the place (registry and name), because a visit may put another tensor object there.
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


def _places(graph_module: fx.GraphModule, part: Block) -> list[_Place]:
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
