"""`BlockWalk`: passes calibration tokens through a model one block at a time, in bounded memory.

Two streams of hidden states run side by side: those of the float model, and those after the blocks in their current
state. Both are kept in a store with a budget. Only the current block has weights.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError, SparsebitError
from sparsebit.execution.blocks.value_store import MIB, SharedData
from sparsebit.execution.distributed import gather
from sparsebit.graph.values.nested import map_nested, tensors_of
from sparsebit.llm.models.architectures import Architecture, Stages, blocks_of, linears, stages_of
from sparsebit.llm.models.calibration_batches import IDS, Batch, Tokens, as_batches, num_tokens, to_device
from sparsebit.llm.models.separate_experts import experts_prefixes
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.llm.process_group import Rank
from sparsebit.numerics.rounding.hessian import InputMoments

Stream = Literal["float", "changed"]
# Bytes of hidden states, or of second moments, on a GPU: the rest of its memory is for the work on a layer.
_ON_DEVICE = 1024 * MIB
_SOME_ROWS = 512
# The arguments of a block besides the hidden states; the same for all batches of one shape.
_Call = tuple[tuple[Any, ...], dict[str, Any]]
# Outputs of block classes: the hidden states, or a tuple that begins with them.
_Form = Callable[[Tensor], Any]
_FORMS: tuple[_Form, ...] = (lambda hidden: hidden, lambda hidden: (hidden,), lambda hidden: (hidden, None))


class _Reached(Exception):
    """Ends a forward whose remainder is not needed."""


class BlockWalk:
    """`tokens`, windows of text or batches of a processor, on their way through the model of a skeleton.

    `with_float`: also keep the float model's stream. `memory_budget`: bytes of hidden states in memory; the rest is on
    disk. In addition, up to 1 GiB are on the device, if that is not a CPU. `rank`: of several processes; each walks its
    share of the batches, and moments are of all of them.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        architecture: Architecture,
        tokens: Tokens,
        *,
        with_float: bool,
        batch_size: int = 4,
        memory_budget: int = 1024 * MIB,
        rank: Rank | None = None,
    ) -> None:
        self.skeleton, self.architecture, self.with_float = skeleton, architecture, with_float
        self.blocks = blocks_of(skeleton.model, architecture)
        self.num_blocks = len(self.blocks)
        self.batches: tuple[Batch, ...] = as_batches(tokens, batch_size)
        # Masks and positions of blocks depend on where a batch has its images.
        self._has_own_calls = not isinstance(tokens, Tensor)
        self.rank = rank
        if rank is not None and rank.count > 1:
            if len(self.batches) < rank.count:
                raise ConfigError(
                    f"{num_tokens(tokens)} tokens in batches of {batch_size} are {len(self.batches)} batches for "
                    f"{rank.count} processes: give more samples, a smaller batch size or fewer processes"
                )
            self.batches = self.batches[rank.number :: rank.count]
        self.memory_budget = memory_budget
        self.store = SharedData(device_bytes=min(memory_budget, _ON_DEVICE), host_bytes=memory_budget)
        self._calls: dict[tuple[int, ...], list[_Call]] = {}  # by the shape of a batch, or by its number
        self._number = 0
        self._form: _Form | None = None

    @torch.no_grad()
    def start(self) -> None:
        """Compute the input of the first block."""
        self.fill_outside()
        for index, batch in enumerate(self.batches):
            hidden, calls = self._front(to_device(batch, self.skeleton.device, self.skeleton.dtype))
            known = self._calls.setdefault(self._key(index), calls)
            if not _same(known, calls):
                raise self._refusal("calls its blocks with arguments that depend on the tokens")
            for stream in ("float", "changed") if self.with_float else ("changed",):
                self.store.put((stream, 0, index), hidden)
        self.skeleton.empty("")

    def _key(self, index: int) -> tuple[int, ...]:
        return (index,) if self._has_own_calls else tuple(self.batches[index][IDS].shape)

    def _refusal(self, why: str) -> ConfigError:
        kind = type(self.skeleton.model).__name__
        return ConfigError(f"{kind} {why}: this architecture cannot be quantized block by block")

    def fill_outside(self, *, with_head: bool = False) -> None:
        """Read the weights outside of the blocks."""
        model = self.skeleton.model
        head = None if with_head else model.get_output_embeddings()
        heads = [name for name, module in model.named_modules() if module is head and name]
        self.skeleton.fill("", without=[self.architecture.blocks, *heads[:1]])
        if with_head:
            model.tie_weights()

    def stages(self, block: nn.Module) -> Stages:
        """The stages of the block: those of the architecture's row, else found by running it on the first batch."""
        known = self.architecture.stages_in(block)
        if known is not None:
            return known
        with torch.no_grad():
            found = stages_of(block, lambda: self.run_first(block))
        unused = sorted(linears(block).keys() - {name for stage in found for name in stage})
        if unused:
            raise ConfigError(
                f"block {self._number} never runs {', '.join(unused)}: add a row for this architecture to "
                "sparsebit/llm/models/architectures.py"
            )
        return found

    @torch.no_grad()
    def moments(self, original: nn.Module, changed: nn.Module, stage: Sequence[str]) -> InputMoments:
        """Second moments of the input of a stage over all batches; and of the float input, if it is walked."""
        found = InputMoments()
        for index in range(len(self.batches)):
            x = self._stage_input(changed, "changed", stage[0], index)
            if self.with_float:
                key = ("input", stage[0], index)
                held = self.store.get(key) if key in self.store else None
                other = self._stage_input(original, "float", stage[0], index) if held is None else held
                found.add(_rows(x), _rows(other.to(x)))
            else:
                found.add(_rows(x))
        return self._over_ranks(found)

    @torch.no_grad()
    def moments_together(self, changed: nn.Module, stages: Stages) -> dict[str, InputMoments]:
        """Second moments of each stage's input, by its first layer, from one pass; experts may get no token. The float
        input is left out: the float model may send other tokens to an expert.
        """
        modules = linears(changed)
        found = {stage[0]: InputMoments() for stage in stages}
        for index in range(len(self.batches)):
            taken: dict[str, Tensor] = {}
            with _hooked({name: modules[name] for name in found}, taken):
                self.run(changed, self._number, index, self.store.get(("changed", self._number, index)))
            for name, x in taken.items():
                found[name].add(_rows(x))
        return {name: self._over_ranks(moments) for name, moments in found.items()}

    def _over_ranks(self, moments: InputMoments) -> InputMoments:
        """The moments of all processes, added in the order of their ranks: the same on each."""
        if self.rank is None or self.rank.count == 1:
            return moments
        total = InputMoments(moments.dtype)
        for state in gather(moments.state()):
            total.merge(InputMoments.from_state(state, self.skeleton.device))
        return total

    def chunks(self, block: nn.Module, stages: Stages) -> Iterator[Stages]:
        """The stages in groups whose second moments fit into the memory budget and into 1 GiB, or one by one."""
        modules, size = linears(block), 0
        held: list[tuple[str, ...]] = []
        for stage in stages:
            needed = 8 * modules[stage[0]].in_features ** 2
            if held and size + needed > min(self.memory_budget, _ON_DEVICE):
                yield tuple(held)
                held, size = [], 0
            held.append(stage)
            size += needed
        if held:
            yield tuple(held)

    @torch.no_grad()
    def run_float(self, original: nn.Module, stages: Stages, *, need_outputs: bool = True) -> None:
        """Compute the float model's outputs of the block, and keep the inputs of its stages if the budget allows. If
        not, and nothing needs the outputs before, `advance` computes them: one hidden state of a batch at a time.
        """
        if not self.with_float:
            return
        modules, inside = linears(original), experts_prefixes(original)
        heads = {stage[0]: modules[stage[0]] for stage in stages if not stage[0].startswith(inside)}
        length = num_tokens(self.batches)
        needed = length * sum(module.in_features for module in heads.values()) * self.skeleton.dtype.itemsize
        is_kept = needed + self.store.host_bytes + self.store.device_bytes <= self.memory_budget
        if not is_kept and not need_outputs:
            return
        for index in range(len(self.batches)):
            taken: dict[str, Tensor] = {}
            with _hooked(heads if is_kept else {}, taken):
                output = self.run(original, self._number, index, self.store.get(("float", self._number, index)))
            for name, value in taken.items():
                self.store.put(("input", name, index), value)
            self.store.put(("float", self._number + 1, index), output)

    @torch.no_grad()
    def advance(self, changed: nn.Module, stages: Stages, original: nn.Module | None = None) -> None:
        """Compute the input of the next block, if there is one. `original`: for what `run_float` has postponed."""
        for index in range(len(self.batches)):
            for stage in stages:
                self.store.drop(("input", stage[0], index))
            hidden = self.store.get(("changed", self._number, index))
            self.store.drop(("changed", self._number, index))
            if self.with_float:
                self._advance_float(original, index)
            if self._number + 1 < self.num_blocks:
                self.store.put(("changed", self._number + 1, index), self.run(changed, self._number, index, hidden))
        self._number += 1

    def _advance_float(self, original: nn.Module | None, index: int) -> None:
        output = ("float", self._number + 1, index)
        hidden: Tensor = self.store.get(("float", self._number, index))
        self.store.drop(("float", self._number, index))
        if output not in self.store and self._number + 1 < self.num_blocks:
            assert original is not None, "run_float was not called, or the float block is not given"
            self.store.put(output, self.run(original, self._number, index, hidden))

    @torch.no_grad()
    def some_rows(self, block: nn.Module, name: str) -> Tensor:
        """Inputs of a layer, `(rows, in)`: of about 512 tokens, then of that with the largest number of each batch."""
        some, extremes = list[Tensor](), list[Tensor]()
        for index in range(len(self.batches)):
            rows = _rows(self._stage_input(block, "changed", name, index))
            some.append(rows[:: max(len(rows) * len(self.batches) // _SOME_ROWS, 1)])
            extremes.append(rows[rows.abs().amax(-1).argmax()][None])
        return torch.cat([*some, *extremes])

    def _stage_input(self, block: nn.Module, stream: Stream, name: str, index: int) -> Tensor:
        taken: dict[str, Tensor] = {}
        with _hooked({name: linears(block)[name]}, taken, stop=True), contextlib.suppress(_Reached):
            self.run(block, self._number, index, self.store.get((stream, self._number, index)))
        return taken[name]

    def run(self, block: nn.Module, number: int, index: int, hidden: Tensor) -> Tensor:
        """The output of block `number` for the hidden states of batch `index`."""
        return _output(block, hidden, self._calls[self._key(index)][number])

    def run_first(self, block: nn.Module) -> Tensor:
        """The output of another version of the block for the first batch."""
        return self.run(block, self._number, 0, self.present("changed", 0))

    def run_some(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """The output of another version of the block for some samples of the batches."""
        count, length = hidden.shape[:2]
        assert not self._has_own_calls
        known = [shape for shape in self._calls if shape[1] == length and shape[0] >= count]
        assert known, f"hidden states of shape {tuple(hidden.shape)}: every batch is smaller"
        size = min(known)[0]
        call = self._calls[min(known)][self._number]
        cut = map_nested(Tensor, lambda one: one[:count] if one.ndim and len(one) == size else one, call)
        return _output(block, hidden, cut)

    def present(self, stream: Stream, index: int) -> Tensor:
        """The input of the present block."""
        value: Tensor = self.store.get((stream, self._number, index))
        return value

    def target(self, index: int) -> Tensor:
        """The output of the present block in the float model; `run_float` has computed it."""
        value: Tensor = self.store.get(("float", self._number + 1, index))
        return value

    def _front(self, batch: dict[str, Tensor]) -> tuple[Tensor, list[_Call]]:
        """The input of block 0, and the other arguments of every block; `_form`: the first that the model takes."""
        refusals: list[ConfigError] = []
        for form in _FORMS if self._form is None else (self._form,):
            try:
                found = self._passed_through(batch, form)
            except ConfigError as error:
                refusals.append(error)
                continue
            self._form = form
            return found
        raise refusals[0]

    def _passed_through(self, batch: dict[str, Tensor], form: _Form) -> tuple[Tensor, list[_Call]]:
        """Run the model with blocks that return their hidden states unchanged: each must run once, on the same."""
        calls: list[_Call] = []
        first = torch.empty(0)

        def record(number: int, *args: Any, **kwargs: Any) -> Any:
            nonlocal first
            hidden: Tensor = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
            if number != len(calls):
                raise self._refusal("does not run its blocks one after another, each once")
            if not calls:
                first = hidden.clone()  # later code might write to the tensor itself
            elif number + 1 == self.num_blocks and not torch.equal(hidden, first):
                raise self._refusal("computes something between its blocks")
            calls.append((args[1:], kwargs))
            return form(hidden)

        try:
            with self._blocks_are(record):
                self.skeleton.model.base_model(**batch, use_cache=False)
        except SparsebitError:
            raise
        except (ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
            raise self._refusal(f"does not take what its blocks give ({error})") from error
        if len(calls) != self.num_blocks:
            raise self._refusal(f"runs {len(calls)} of its {self.num_blocks} blocks")
        return first, calls

    def behind_blocks(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The logits for `hidden`, the output of the last block; the weights outside of the blocks must be present."""
        assert self._form is not None, "start was not called"
        given = self._form(hidden)
        with self._blocks_are(lambda number, *_, **__: given):
            logits: Tensor = self.skeleton.model(input_ids=tokens, use_cache=False).logits
        return logits

    @contextlib.contextmanager
    def _blocks_are(self, function: Callable[..., Any]) -> Iterator[None]:
        for number, block in enumerate(self.blocks):
            block.forward = functools.partial(function, number)
        try:
            yield
        finally:
            for block in self.blocks:
                del block.forward


def _output(block: nn.Module, hidden: Tensor, call: _Call) -> Tensor:
    found = block(hidden, *call[0], **call[1])
    output: Tensor = found[0] if isinstance(found, tuple) else found
    return output


@contextlib.contextmanager
def _hooked(modules: dict[str, nn.Linear], taken: dict[str, Tensor], *, stop: bool = False) -> Iterator[None]:
    """Inside, the inputs of the modules are stored in `taken`; `stop`: the forward ends there."""

    def take(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        taken[name] = args[0]
        if stop:
            raise _Reached

    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(functools.partial(take, name)))
        yield


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _same(known: list[_Call], calls: list[_Call]) -> bool:
    if known is calls:
        return True
    left, right = tensors_of(known), tensors_of(calls)
    if len(left) != len(right) or not all(map(torch.equal, left, right)):
        return False
    return repr(map_nested(Tensor, lambda _: None, known)) == repr(map_nested(Tensor, lambda _: None, calls))
