"""`TrainingLoop`: adapters, their optimizer and the losses so far; one step at a time, in one process or several.

A step has the same result in any number of processes and after any interruption: rows are planned for all steps in
advance, and the seed of dropout depends only on the step and the place of the rows. Subclasses override where the
model is (`place`), which rows a process computes (`parts_of`) and how gradients are added (`add_up`, `clip`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.execution.run_folder import read_part, write_part
from sparsebit.llm.finetuning.data.instructions import Sample
from sparsebit.llm.finetuning.data.sample_packing import Batch, check_packing, make_batch, plan_epochs
from sparsebit.llm.finetuning.data.token_loss import LossOfBatch, choose_loss, forward
from sparsebit.llm.finetuning.layers.packed_lora import add_adapter
from sparsebit.llm.finetuning.layers.recorded_blocks import BlockRecorder, may_draw, record_blocks
from sparsebit.llm.finetuning.tuning import Tuning
from sparsebit.llm.models.hub_classes import package
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
        how: dict[str, Any] = {"rank": tuning.rank, "alpha": tuning.alpha, "dropout": tuning.dropout}
        self.peft_model = add_adapter(backbone, targets=tuning.targets, seed=tuning.seed, base=base, **how)
        self.model = self.peft_model.get_base_model()
        self.place()
        if tuning.packing:
            self.check_packing()  # new adapters have no effect yet
        if tuning.gradient_checkpointing:
            self.checkpoint_blocks()
        self.model.train()
        self.parameters = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        trained = list(self.parameters.values())
        self.optimizer_name, self.optimizer = make_optimizer(tuning.optimizer, rank.device, trained, tuning)
        order = {"num_epochs": tuning.num_epochs, "batch_size": tuning.batch_size, "seed": tuning.seed}
        steps = plan_epochs(samples, tuning.length, packing=tuning.packing, **order)
        self.steps = steps[: tuning.max_steps]
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
        if self.parameters.keys() != state.parameters.keys():
            raise CheckpointError("the state of the training has other adapters than the model; remove it")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state.parameters[name])
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
        """Sum the gradients, and the loss, over all processes, in one message; returns the sum of the losses."""
        parameters = list(self.parameters.values())
        with torch.no_grad():
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


OPTIMIZERS: dict[str, str | None] = {"adamw": None, "adamw8bit": "AdamW8bit", "paged_adamw8bit": "PagedAdamW8bit"}


def make_optimizer(
    name: str, device: torch.device, parameters: Sequence[nn.Parameter], tuning: Tuning
) -> tuple[str, torch.optim.Optimizer]:
    """The optimizer and its name; "auto" is the paged 8-bit one on a GPU if bitsandbytes is installed."""
    if name == "auto":
        name = "paged_adamw8bit" if device.type == "cuda" and find_spec("bitsandbytes") is not None else "adamw"
    kind, how = OPTIMIZERS[name], dict[str, Any](lr=tuning.learning_rate, weight_decay=tuning.weight_decay)
    if kind is None:
        return name, torch.optim.AdamW(parameters, **how)
    if device.type != "cuda":
        raise ConfigError(f"optimizer={name!r} on {device}: bitsandbytes runs on GPUs; use 'adamw'")
    bitsandbytes = package("bitsandbytes", "", f"optimizer={name!r} (instead of 'adamw')")
    return name, getattr(bitsandbytes.optim, kind)(parameters, **how)


_NUM_KEPT = 2


@dataclass(frozen=True)
class TrainingState:
    """The state of a training after `step` steps. `losses`: of each of them."""

    step: int
    losses: tuple[float, ...]
    parameters: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]


def save_state(folder: Path, state: TrainingState) -> None:
    """Keep the state; older ones are removed once it is on the disk."""
    tensors = {f"parameter.{name}": value for name, value in state.parameters.items()}
    numbers: dict[str, dict[str, Any]] = {}
    for index, entries in state.optimizer["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}"] = value
            else:
                numbers.setdefault(str(index), {})[name] = value
    losses, optimizer = json.dumps(state.losses), json.dumps(numbers)
    write_part(_file(folder, state.step), tensors, {"step": str(state.step), "losses": losses, "optimizer": optimizer})
    for old in _files(folder)[:-_NUM_KEPT]:
        old.unlink(missing_ok=True)


def newest_state(folder: Path, optimizer: torch.optim.Optimizer) -> TrainingState | None:
    """The last state that was kept; None if there is none."""
    steps = saved_steps(folder)
    return state_at(folder, steps[-1], optimizer) if steps else None


def saved_steps(folder: Path) -> list[int]:
    """After how many steps states were kept that are still there, in order."""
    return [int(path.stem.removeprefix("step-")) for path in _files(folder)]


def state_at(folder: Path, step: int, optimizer: torch.optim.Optimizer) -> TrainingState:
    """The state that was kept after so many steps."""
    tensors, metadata = read_part(_file(folder, step))
    entries = {int(index): dict(values) for index, values in json.loads(metadata["optimizer"]).items()}
    parameters: dict[str, Tensor] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "parameter":
            parameters[rest] = value
        else:
            index, _, entry = rest.partition(".")
            entries.setdefault(int(index), {})[entry] = value
    whole = {"state": entries, "param_groups": optimizer.state_dict()["param_groups"]}
    return TrainingState(int(metadata["step"]), tuple(json.loads(metadata["losses"])), parameters, whole)


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}.safetensors"


def _files(folder: Path) -> Sequence[Path]:
    return sorted(folder.glob("step-*.safetensors"))
