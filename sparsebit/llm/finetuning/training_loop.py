"""`TrainingLoop`: adapters, their optimizer and the losses so far; one step at a time, in one process or several.

A step has the same result in any number of processes and after any interruption: rows are planned for all steps in
advance, and the seed of dropout depends only on the step and the place of the rows. Subclasses override where the
model is (`place`), which rows a process computes (`parts_of`) and how gradients are added (`add_up`, `clip`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.llm.finetuning.data.instructions import Sample
from sparsebit.llm.finetuning.data.packing_check import check_packing
from sparsebit.llm.finetuning.data.sample_packing import Batch, make_batch, plan_epochs
from sparsebit.llm.finetuning.data.token_loss import LossOfBatch, choose_loss, forward
from sparsebit.llm.finetuning.layers.packed_lora import add_adapter
from sparsebit.llm.finetuning.layers.recorded_blocks import BlockRecorder, may_draw, record_blocks
from sparsebit.llm.finetuning.optimizers import make_optimizer, resolve_optimizer
from sparsebit.llm.finetuning.training_files import TrainingState, newest_state, restore_parameters, save_state
from sparsebit.llm.finetuning.tuning import Tuning
from sparsebit.llm.process_group import Rank
from sparsebit.progress import note

Steps = Sequence[Sequence[Sequence[int]]]


class TrainingLoop:
    """The model, its optimizer, and the losses of the steps so far. Rows are split over the processes."""

    can_record = True  # blocks are not changed, and are on one device
    recorder: BlockRecorder | None = None

    def __init__(
        self, backbone: Any, samples: Sequence[Sample], tuning: Tuning, rank: Rank, pad_token: int, base: str
    ) -> None:
        self.samples, self.tuning, self.rank, self.pad_token = samples, tuning, rank, pad_token
        self.model = backbone
        self.peft_model = add_adapter(
            backbone,
            rank=tuning.rank,
            alpha=tuning.alpha,
            dropout=tuning.dropout,
            targets=tuning.targets,
            seed=tuning.seed,
            base=base,
        )
        self.model = self.peft_model.get_base_model()
        self.place()
        if tuning.packing:
            self.check_packing()  # new adapters have no effect yet
        if tuning.gradient_checkpointing:
            self.checkpoint_blocks()
        self.model.train()
        self.parameters = trainable(self.model)
        self.optimizer_name = resolve_optimizer(tuning.optimizer, rank.device)
        self.optimizer = make_optimizer(
            self.optimizer_name,
            list(self.parameters.values()),
            learning_rate=tuning.learning_rate,
            weight_decay=tuning.weight_decay,
        )
        self.steps = plan(samples, tuning)
        self.num_steps = len(self.steps)
        self.losses: list[float] = []
        self._loss: LossOfBatch | None = None

    def checkpoint_blocks(self) -> None:
        """Recompute blocks in the backward; on a GPU, if rows are filled, as recorded graphs."""
        settings = {"use_reentrant": False, "preserve_rng_state": may_draw(self.model)}
        # The newer name is of transformers 5.23.
        newer = getattr(self.model, "activation_checkpointing_enable", None)
        (newer or self.model.gradient_checkpointing_enable)(settings)
        if self.can_record and self.rank.device.type == "cuda" and self.tuning.packing:
            shape = self.tuning.micro_batch_size, self.tuning.length
            self.recorder = record_blocks(self.model, shape, self.rank.device)

    def place(self) -> None:
        """Move the model with its adapters to the training device; here it is there already."""

    def check_packing(self) -> None:
        """Raise for packing if the model does not keep the samples of a row separate."""
        check_packing(self.model, self.samples, lambda batch: forward(self.model, batch).logits)

    def resume(self, folder: Path) -> int:
        """Load the newest state that rank 0 finds; returns how many steps are done."""
        return self.continue_from(self.rank.from_first(lambda: newest_state(folder, self.optimizer)))

    def continue_from(self, state: TrainingState | None) -> int:
        """Load a state; returns how many steps are done."""
        if state is None:
            return 0
        restore_parameters(self.parameters, state.parameters)
        self.optimizer.load_state_dict(dict(state.optimizer))
        self.losses = list(state.losses)
        return state.step

    def keep(self, folder: Path, step: int) -> None:
        """Write the state after so many steps."""
        if self.rank.is_first:
            save_state(folder, self.state(step))

    def adapter_tensors(self) -> dict[str, Tensor] | None:
        """All adapters by the names of peft; None, if this process has them all in its model."""
        return None

    def state(self, step: int) -> TrainingState:
        values = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return TrainingState(step, tuple(self.losses), values, self.optimizer.state_dict())

    def num_learned(self, rows: Sequence[Sequence[int]]) -> int:
        return sum(self.samples[number].num_learned for row in rows for number in row)

    def step(self, number: int) -> None:
        """One step of the optimizer: gradients of all rows, added up over the processes, then clipped."""
        loss = self.gradients(number)
        if not math.isfinite(loss):
            raise ConfigError(
                f"the loss of step {number + 1} is not finite with learning_rate={self.tuning.learning_rate:g}; lower "
                "it, or begin with a model whose perplexity is finite"
            )
        if self.tuning.max_grad_norm:
            self.clip()
        for group in self.optimizer.param_groups:
            group["lr"] = self.tuning.learning_rate_at(number, self.num_steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss)
        note(f"loss {loss:.3f}")

    def clip(self) -> None:
        """Scale the gradients down to the largest allowed norm."""
        nn.utils.clip_grad_norm_(list(self.parameters.values()), self.tuning.max_grad_norm)

    def gradients(self, number: int) -> float:
        """Fill the gradients of the step's mean loss per learned token; returns that mean."""
        total = self.num_learned(self.steps[number])
        loss = torch.zeros((), device=self.rank.device)
        for index, whole in self.parts_of(number):
            batch = whole.to(self.rank.device)
            # Dropout depends only on the place of the rows, not on earlier work: a resumed run draws the same.
            torch.manual_seed(seed_of(self.tuning.seed, number, index))
            if self._loss is None:
                self._loss = choose_loss(self.model, batch)
            part = self._loss(self.model, batch) / total
            part.backward()
            loss += part.detach()
        if self.rank.count > 1:
            loss = self.add_up(loss)
        return float(loss)

    def parts_of(self, number: int) -> list[tuple[int, Batch]]:
        """The micro-batches of a step that this process computes, with their places among all of the step."""
        rows, size = self.steps[number], self.tuning.micro_batch_size
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        width = 0 if self.recorder is None else self.tuning.length  # recordings are for one length
        return [
            (index, make_batch(self.samples, parts[index], self.pad_token, width=width))
            for index in range(self.rank.number, len(parts), self.rank.count)
        ]

    def add_up(self, loss: Tensor) -> Tensor:
        """Sum the gradients over all processes; returns the sum of the losses."""
        return add_up(list(self.parameters.values()), loss)


def plan(samples: Sequence[Sample], tuning: Tuning) -> Steps:
    """The rows of each step."""
    steps = plan_epochs(
        samples,
        tuning.length,
        packing=tuning.packing,
        num_epochs=tuning.num_epochs,
        batch_size=tuning.batch_size,
        seed=tuning.seed,
    )
    return steps[: tuning.max_steps]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def add_up(parameters: Sequence[nn.Parameter], loss: Tensor) -> Tensor:
    """Sum the gradients, and the loss, over all processes, in one message."""
    parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    flat = torch.cat([*(part.float().flatten() for part in parts), loss.float().view(1)])
    dist.all_reduce(flat)
    pieces = flat[:-1].split([one.numel() for one in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter).to(parameter.dtype)
    return flat[-1]


def clip_over_processes(gradients: Sequence[Tensor], largest: float, device: torch.device) -> None:
    """Scale the gradients so that their norm, over those of all processes, is at most `largest`."""
    total = torch.zeros((), device=device)
    for gradient in gradients:
        total += gradient.float().square().sum()
    dist.all_reduce(total)
    factor = (largest / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


def seed_of(seed: int, step: int, index: int) -> int:
    """The seed of the dropout in one part of a step."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {index}".encode()).digest()[:7], "big")
