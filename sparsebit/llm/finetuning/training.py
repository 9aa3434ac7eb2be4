"""`finetune`: adapters of a packed model, trained on instructions; resumable, in one process or several."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.folders import flush, staging_folder
from sparsebit.llm.finetuning.instructions import Sample, read_instructions
from sparsebit.llm.finetuning.optimizers import make_optimizer, resolve_optimizer
from sparsebit.llm.finetuning.packed_lora import add_adapter, peft_module
from sparsebit.llm.finetuning.packing_check import check_packing
from sparsebit.llm.finetuning.sample_packing import make_batch, plan_epochs
from sparsebit.llm.finetuning.token_loss import LossOfBatch, choose_loss
from sparsebit.llm.finetuning.training_files import TrainingState, newest_state, restore_parameters, save_state
from sparsebit.llm.finetuning.tuning import Tuning
from sparsebit.llm.hub_classes import load_tokenizer
from sparsebit.llm.loading import load
from sparsebit.llm.process_group import Rank, joined
from sparsebit.llm.run_folder import RunFolder
from sparsebit.progress import note, track
from sparsebit.tensor_files import digest

log = logging.getLogger(__name__)
RECORD = "training.json"
Steps = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class FinetunedModel:
    """What `finetune` made. `losses`: of each step, the mean negative log-likelihood of a learned token.

    `num_learned`: tokens that were learned, over all steps. `num_resumed`: steps that an interrupted run had done.
    """

    folder: Path
    tuning: Tuning
    optimizer: str
    losses: tuple[float, ...]
    num_samples: int
    num_learned: int
    num_parameters: int
    num_resumed: int
    seconds: float


def finetune(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str],
    output: str | os.PathLike[str],
    tuning: Tuning | None = None,
    *,
    save_every: int = 50,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> FinetunedModel:
    """Train LoRA adapters on the frozen model of a folder, whose weights stay packed, and write them as peft does.

    `model`: a packed folder, or a float one. `data`: JSON lines, see `read_instructions`; only responses are learned.
    `output`: a folder that does not exist yet; it appears whole at the end. `dtype`: of activations and float weights;
    bfloat16 on a GPU, float32 on a CPU. Every `save_every` steps the state is kept in `OUTPUT.partial`, and the same
    call goes on from there with the same result. Under torchrun the rows of each step are split over the processes.
    """
    started = time.monotonic()
    tuning = tuning or Tuning()
    target = Path(output)
    if target.exists():
        raise ConfigError(f"output {target} exists; remove it or give another folder")
    if save_every < 1:
        raise ConfigError(f"save_every={save_every}: allowed: 1 or more")
    peft_module()
    tokenizer = load_tokenizer(Path(model), trust_remote_code=trust_remote_code)
    samples = read_instructions(
        Path(data),
        tokenizer,
        length=tuning.length,
        chat_template=tuning.chat_template,
        too_long=tuning.too_long,
    )
    with joined(device) as rank:
        dtype = dtype or (torch.float32 if rank.device.type == "cpu" else torch.bfloat16)
        backbone = load(model, dtype=dtype, device=rank.device, trust_remote_code=trust_remote_code)
        settings = _settings(tuning, samples, backbone, dtype)
        run = _Training(backbone, samples, tuning, rank, _pad_token(tokenizer), str(model))
        partial = target.with_name(f"{target.name}.partial")
        rank.from_first(lambda: RunFolder(partial, settings | {"optimizer": run.optimizer_name}).path)
        num_resumed = run.resume(partial)
        with torch.random.fork_rng(devices=[rank.device] if rank.device.type == "cuda" else []):
            for step in track(range(num_resumed, run.num_steps), "fine-tuning"):
                run.step(step)
                if rank.is_first and (step + 1) % save_every == 0:
                    save_state(partial, run.state(step + 1))
        num_learned = sum(run.num_learned(rows) for rows in run.steps)
        found = FinetunedModel(
            target,
            tuning,
            run.optimizer_name,
            tuple(run.losses),
            len(samples),
            num_learned,
            sum(parameter.numel() for parameter in run.parameters.values()),
            num_resumed,
            time.monotonic() - started,
        )
        rank.from_first(lambda: _write(target, run.peft_model, found, partial))
    log.info("%s: %d steps, loss %.4f -> %.4f", target, len(found.losses), found.losses[0], found.losses[-1])
    return found


class _Training:
    """The model, its optimizer, and the losses of the steps so far."""

    def __init__(
        self, backbone: Any, samples: Sequence[Sample], tuning: Tuning, rank: Rank, pad_token: int, base: str
    ) -> None:
        self.samples, self.tuning, self.rank, self.pad_token = samples, tuning, rank, pad_token
        if tuning.packing:
            check_packing(backbone, samples)
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
        if tuning.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
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

    def resume(self, folder: Path) -> int:
        """Take up the newest state that rank 0 finds; how many steps are done."""
        state = self.rank.from_first(lambda: newest_state(folder, self.optimizer))
        if state is None:
            return 0
        restore_parameters(self.parameters, state.parameters)
        self.optimizer.load_state_dict(dict(state.optimizer))
        self.losses = list(state.losses)
        return state.step

    def state(self, step: int) -> TrainingState:
        values = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return TrainingState(step, tuple(self.losses), values, self.optimizer.state_dict())

    def num_learned(self, rows: Sequence[Sequence[int]]) -> int:
        return sum(self.samples[number].num_learned for row in rows for number in row)

    def step(self, number: int) -> None:
        """One step of the optimizer: gradients of all rows, added up over the processes, then clipped."""
        loss = self._gradients(number)
        if not math.isfinite(loss):
            raise ConfigError(
                f"the loss of step {number + 1} is not finite with learning_rate={self.tuning.learning_rate:g}; lower "
                "it, or begin with a model whose perplexity is finite"
            )
        if self.tuning.max_grad_norm:
            nn.utils.clip_grad_norm_(list(self.parameters.values()), self.tuning.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.tuning.learning_rate_at(number, self.num_steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss)
        note(f"loss {loss:.3f}")

    def _gradients(self, number: int) -> float:
        """Fill the gradients of the mean loss of a learned token of the step; that mean."""
        rows, size = self.steps[number], self.tuning.micro_batch_size
        total = self.num_learned(rows)
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        loss = torch.zeros((), device=self.rank.device)
        for index in range(self.rank.number, len(parts), self.rank.count):
            batch = make_batch(self.samples, parts[index], self.pad_token).to(self.rank.device)
            # Dropout depends on the place of the rows alone, not on what ran before: a resumed run draws the same.
            torch.manual_seed(_seed(self.tuning.seed, number, index))
            if self._loss is None:
                self._loss = choose_loss(self.model, batch)
            part = self._loss(self.model, batch) / total
            part.backward()
            loss += part.detach()
        if self.rank.count > 1:
            loss = add_up(list(self.parameters.values()), loss)
        return float(loss)


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


def _seed(seed: int, step: int, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {index}".encode()).digest()[:7], "big")


def _settings(tuning: Tuning, samples: Sequence[Sample], backbone: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """What decides the result. Of each weight of the backbone the first values stand for all."""
    tokens = json.dumps([[sample.tokens, sample.is_learned] for sample in samples])
    firsts = {
        name: tensor.detach().flatten()[:1024].cpu()
        for name, tensor in [*backbone.named_parameters(), *backbone.named_buffers()]
    }
    return {
        "tuning": asdict(tuning) | {"targets": list(tuning.targets)},
        "data": hashlib.sha256(tokens.encode()).hexdigest(),
        "model": digest(firsts),
        "dtype": str(dtype),
    }


def _pad_token(tokenizer: Any) -> int:
    """Any token: what stands behind the samples of a row is neither learned nor seen by them."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def _write(target: Path, peft_model: Any, found: FinetunedModel, partial: Path) -> None:
    record = asdict(replace(found, folder=Path()))
    record.pop("folder")
    with staging_folder(target) as staging:
        made = staging / target.name
        peft_model.save_pretrained(str(made), safe_serialization=True, save_embedding_layers=False)
        (made / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        for path in made.iterdir():
            flush(path)
        os.replace(made, target)
    shutil.rmtree(partial, ignore_errors=True)
