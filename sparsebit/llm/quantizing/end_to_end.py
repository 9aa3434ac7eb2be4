"""Training of all blocks together on the logits of the float model, after they were quantized one by one.

Chen et al., "EfficientQAT" (2024), section 3.3, trains scales end to end; here codes, scales and zero points learn,
and the loss is the divergence from the float model's predictions, so the text needs no labels. As in the walk, one
block computes at a time: a step runs forward through all blocks and keeps their inputs, then backward, computing each
block again unless the graphs of all fit into the memory budget, and each block takes its step of Adam at once. A store
keeps the state of the others on the device, on the host or on disk. The float model runs once, before: its last hidden
states are kept, one for each token.

Held-out windows decide: the result is the state with the smallest divergence on them, or the start.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.errors import CalibrationError, CheckpointError, ConfigError
from sparsebit.execution.blocks.training import decayed
from sparsebit.execution.blocks.value_store import SharedData
from sparsebit.execution.held_out import num_held
from sparsebit.execution.run_folder import RunFolder
from sparsebit.llm.checkpoint.packed_folder import FinishedBlock
from sparsebit.llm.models.calibration_batches import IDS
from sparsebit.llm.quantizing.block_walk import BlockWalk
from sparsebit.llm.quantizing.learned_block import LearnedBlock
from sparsebit.llm.quantizing.learned_rounding import LATENT_RATES
from sparsebit.progress import note, track

log = logging.getLogger(__name__)
NOTE = "end_to_end.json"
_CHECKS = 4  # how often the held-out windows are measured, and the state is kept for a run that continues
_WARM_UP = 0.05  # share of the steps in which the learning rate grows
_HELD = 1 / 8
_STEP = "step"  # of a part of the run's folder


@dataclass(frozen=True)
class EndToEnd:
    """`divergence`: from the float model on held-out windows, in nats a token, before and after; `kept_step`: after how
    many of the `steps` the result was best; 0: what was quantized block by block stays.
    """

    steps: int
    num_windows: int
    num_held: int
    before: float
    after: float
    kept_step: int


@dataclass
class _Progress:
    """The state of a run, besides its tensors."""

    step: int = 0
    before: float = 0.0
    best: float = 0.0
    kept_step: int = 0

    @classmethod
    def of(cls, text: str, where: str) -> _Progress:
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{where} is damaged ({error!r}); remove its folder to begin anew") from None


@dataclass(frozen=True)
class _Pass:
    """A block's output for a batch, and what it follows from; `state`: its tensors are the parameters."""

    state: dict[str, Tensor]
    parameters: list[Tensor]
    hidden: Tensor
    output: Tensor


def num_windows(steps: int, batch_size: int) -> int:
    """The most windows of text that the training uses: each one once, and the held-out ones."""
    wanted = steps * batch_size
    return wanted + num_held(wanted, _HELD)


def need_two_batches(tokens: Tensor, batch_size: int) -> None:
    """Raise for text that is too short to learn on one batch and hold out another."""
    if len(tokens) <= batch_size:
        raise ConfigError(
            f"{len(tokens)} windows of text in batches of {batch_size}: end-to-end training learns on one batch and "
            "holds out another; give more text, or a smaller batch size"
        )


def result_part(number: int, num_blocks: int, steps: int, kept_step: int) -> int:
    """The part of the run's folder with block `number` as it was after `kept_step` steps."""
    return num_blocks * (1 + checks(steps).index(kept_step)) + number


def checks(steps: int) -> list[int]:
    """After how many steps the held-out windows are measured.

    >>> checks(500), checks(2)
    ([125, 250, 375, 500], [1, 2])
    """
    return sorted({-(-steps * (number + 1) // _CHECKS) for number in range(_CHECKS)})


class EndToEndTraining:
    """`walk`: over the windows of the training, not started; `finished(n)`: block n, as it was quantized."""

    def __init__(
        self,
        walk: BlockWalk,
        paths: Sequence[str],
        finished: Callable[[int], FinishedBlock],
        steps: int,
        facts: Sequence[dict[str, str]],
    ) -> None:
        self.walk, self.paths, self.finished, self.steps, self.facts = walk, paths, finished, steps, facts
        self.skeleton, self.device = walk.skeleton, walk.skeleton.device
        count, size = len(walk.batches), len(walk.batches[0][IDS])
        held = max(round(num_held(sum(map(self._size, range(count))), _HELD) / size), 1)
        self.learned, self.held = range(count - held), range(count - held, count)
        self.blocks: list[LearnedBlock] = []
        free = torch.cuda.mem_get_info(self.device)[0] // 2 if self.device.type == "cuda" else 0
        self.states = SharedData(device_bytes=free, host_bytes=walk.memory_budget)
        self._keeps_graphs: bool | None = None  # decided by the first pass

    def run(self, folder: RunFolder) -> EndToEnd:
        """Train, or continue; the results are parts of the folder (`result_part`)."""
        known = folder.note(NOTE)
        progress = None if known is None else _Progress.of(known, str(folder.path / NOTE))
        if progress is None or progress.step < self.steps:
            progress = self._train(folder, progress)
        held, learned = (sum(map(self._size, part)) for part in (self.held, self.learned))
        return EndToEnd(self.steps, learned, held, progress.before, progress.best, progress.kept_step)

    def _train(self, folder: RunFolder, progress: _Progress | None) -> _Progress:
        self._prepare()
        if progress is None:
            found = self._held_divergence()
            progress = _Progress(before=found, best=found)
        else:
            self._restore(folder, progress.step)
        order = self._order()
        for step in track(range(self.steps), "training end to end"):
            index = next(order)
            if step < progress.step:
                continue
            note(f"divergence {self._step(step, index):.3g}")
            if step + 1 in checks(self.steps):
                self._check(folder, progress, step + 1)
        for block in self.blocks:
            block.close()
        self.skeleton.empty("")
        return progress

    @torch.no_grad()
    def _prepare(self) -> None:
        """One pass of the float model; then the blocks hold what was quantized."""
        walk, store = self.walk, self.walk.store
        walk.start()
        for number, path in enumerate(track(self.paths, "float model")):
            block = self.skeleton.fill(path)
            is_last = number + 1 == len(self.paths)
            for index in range(len(walk.batches)):
                hidden = store.get(("changed", number, index))
                if number == 0:
                    store.put(("first", index), hidden)
                if is_last:
                    store.put(("float", index), walk.run(block, number, index, hidden))
            walk.advance(block, ())
            self.blocks.append(LearnedBlock(block, self.finished(number), LATENT_RATES))
            self.states.put(number, self.blocks[-1].state())
            self.blocks[-1].release()
            self.skeleton.folder.close()
        walk.fill_outside(with_head=True)

    def _size(self, index: int) -> int:
        """The number of windows of a batch."""
        return len(self.walk.batches[index][IDS])

    def _order(self) -> Iterator[int]:
        """The batches in random order, again and again."""
        generator = torch.Generator().manual_seed(0)
        while True:
            yield from torch.randperm(len(self.learned), generator=generator).tolist()

    def _step(self, step: int, index: int) -> float:
        rate = min((step + 1) / max(_WARM_UP * self.steps, 1), 1.0) * decayed("cosine", step / self.steps)
        passes: list[_Pass] = []
        if self._keeps_graphs:
            for number in range(len(self.blocks)):
                passes.append(self._pass(number, index, passes[-1].output if passes else self._first(index)))
            inputs = [passes[-1].output]
        else:
            inputs = self._forward(index)
        loss, gradient = self._divergence(index, inputs.pop(), backward=True)
        if not math.isfinite(loss) or gradient is None:
            raise CalibrationError(f"step {step} of the end-to-end training: the divergence is {loss}")
        for number in range(len(self.blocks) - 1, -1, -1):
            one = passes.pop() if passes else self._pass(number, index, inputs.pop())
            wanted = [one.hidden, *one.parameters] if number else one.parameters
            found = torch.autograd.grad(one.output, wanted, gradient, allow_unused=True)
            gradient = found[0] if number else None
            self.blocks[number].step(one.state, found[-len(one.parameters) :], step, rate)
            self.states.put(number, one.state)
            self.blocks[number].release()
            del one, found, wanted
        return loss

    def _first(self, index: int) -> Tensor:
        """The input of the first block."""
        hidden: Tensor = self.walk.store.get(("first", index))
        return hidden

    def _pass(self, number: int, index: int, hidden: Tensor) -> _Pass:
        """Run a block for a batch, connected by autograd."""
        state, block = self._take(number), self.blocks[number]
        hidden = hidden.detach().requires_grad_(number > 0)
        sizes: dict[int, int] = {}

        def measured(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        is_first = self._keeps_graphs is None
        hooks = torch.autograd.graph.saved_tensors_hooks(measured, lambda tensor: tensor)
        with torch.enable_grad(), hooks if is_first else contextlib.nullcontext():
            output = self.walk.run(block.block, number, index, hidden)
        if is_first:
            self._keeps_graphs = sum(sizes.values()) * len(self.blocks) <= self._free_bytes()
        return _Pass(state, block.parameters(), hidden, output)

    def _free_bytes(self) -> int:
        """Room for the graphs of all blocks, which saves computing each block again; 0 if not even the states fit."""
        if self.device.type == "cuda":
            return (
                0 if self.states.host_bytes or self.states.disk_bytes else torch.cuda.mem_get_info(self.device)[0] // 2
            )
        used = self.walk.store.host_bytes + self.states.host_bytes
        return 0 if self.states.disk_bytes else self.walk.memory_budget - used

    @torch.no_grad()
    def _forward(self, index: int) -> list[Tensor]:
        """The inputs of all blocks for a batch, and the output of the last one."""
        hidden = [self._first(index)]
        for number, block in enumerate(self.blocks):
            self._take(number)
            hidden.append(self.walk.run(block.block, number, index, hidden[-1]))
            block.release()
        return hidden

    def _take(self, number: int) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.states.get(number)
        self.blocks[number].take(state)
        return state

    def _divergence(self, index: int, hidden: Tensor, *, backward: bool) -> tuple[float, Tensor | None]:
        """The mean over the tokens of a batch, and its gradient; logits of one window are in memory at a time."""
        tokens = self.walk.batches[index][IDS].to(self.device)
        target = self.walk.store.get(("float", index))
        total, gradients = 0.0, list[Tensor]()
        for row in range(len(tokens)):
            own, one = slice(row, row + 1), hidden[row : row + 1].detach().requires_grad_(backward)
            with torch.no_grad():
                wanted = F.log_softmax(self.walk.behind_blocks(tokens[own], target[own]).float(), -1)
            with torch.set_grad_enabled(backward):
                found = F.log_softmax(self.walk.behind_blocks(tokens[own], one).float(), -1)
                loss = F.kl_div(found, wanted, log_target=True, reduction="sum") / tokens.numel()
            if backward:
                gradients += torch.autograd.grad(loss, one)
            total += float(loss.detach())
        return total, torch.cat(gradients) if backward else None

    @torch.no_grad()
    def _held_divergence(self) -> float:
        total = count = 0.0
        for index in self.held:
            size = self._size(index)
            total += size * self._divergence(index, self._forward(index)[-1], backward=False)[0]
            count += size
        return total / count

    def _check(self, folder: RunFolder, progress: _Progress, step: int) -> None:
        """Measure; keep the result if it is the best one, and the state, unless this was the last step."""
        found = self._held_divergence()
        log.info("end to end, step %d of %d: divergence %.4f on held-out text", step, self.steps, found)
        progress.step = step
        is_best = found < progress.best
        if is_best:
            progress.best, progress.kept_step = found, step
        count = len(self.blocks)
        for number, block in enumerate(self.blocks):
            state = self._take(number)
            facts = {**self.facts[number], _STEP: str(step)}
            if is_best:
                tensors, more = block.result().to_tensors()
                folder.write(result_part(number, count, self.steps, step), tensors, {**more, **facts})
            if step < self.steps:
                folder.write(self._state_part(number, step), state, facts)
            block.release()
        folder.keep_note(NOTE, json.dumps(asdict(progress)))

    def _state_part(self, number: int, step: int) -> int:
        """In turn two places, so that the state before is whole until the new one is."""
        place = checks(self.steps).index(step) % 2
        return len(self.blocks) * (1 + _CHECKS + place) + number

    def _restore(self, folder: RunFolder, step: int) -> None:
        for number in range(len(self.blocks)):
            part = self._state_part(number, step)
            found = folder.read(part, {**self.facts[number], _STEP: str(step)})
            if found is None:
                raise CheckpointError(f"{folder.file(part)} is missing; remove {folder.path} to begin anew")
            self.states.put(number, {name: value.to(self.device) for name, value in found[0].items()})
