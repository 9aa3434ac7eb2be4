"""Training with a pipeline: each process has some of the blocks, and micro-batches pass through all of them (1F1B)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.execution.distributed import gather
from sparsebit.llm.finetuning.data.instructions import Sample
from sparsebit.llm.finetuning.data.packing_check import check_packing
from sparsebit.llm.finetuning.data.sample_packing import IGNORED, Batch, make_batch
from sparsebit.llm.finetuning.distributed.pipeline_stage import PipelineStageModule
from sparsebit.llm.finetuning.training_files import save_state, saved_steps, state_at
from sparsebit.llm.finetuning.training_loop import TrainingLoop, clip_over_processes, seed_of
from sparsebit.llm.finetuning.tuning import Tuning
from sparsebit.llm.process_group import Rank


class PipelineTraining(TrainingLoop):
    """The stage of this process, its part of the adapters and of the optimizer."""

    can_record = False  # micro-batches wait for their backward, several at a time

    def __init__(
        self,
        stage: PipelineStageModule,
        samples: Sequence[Sample],
        tuning: Tuning,
        rank: Rank,
        pad_token: int,
        base: str,
    ) -> None:
        if tuning.batch_size % tuning.micro_batch_size:
            raise ConfigError(
                f"batch_size={tuning.batch_size} with micro_batch_size={tuning.micro_batch_size}: a pipeline needs "
                "micro-batches of one size; give a multiple"
            )
        self.stage = stage
        super().__init__(stage.model, samples, tuning, rank, pad_token, base)
        self._total = 1
        self._schedule = self._make_schedule()

    def check_packing(self) -> None:
        """On the first stage: the output of its last block must not depend on the other samples of a row."""

        def outputs(batch: Batch) -> Tensor:
            found: Tensor = self.stage(batch.tokens, positions=batch.positions)
            return found

        self.rank.from_first(lambda: check_packing(self.model, self.samples, outputs))

    def _make_schedule(self) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        shape = (self.tuning.micro_batch_size, self.tuning.length)
        device, config = self.rank.device, self.model.config.get_text_config()
        given = torch.zeros(shape, dtype=torch.int64, device=device)
        if not self.stage.is_first:
            given = torch.zeros(*shape, config.hidden_size, dtype=self.stage.dtype, device=device).requires_grad_()
        stage = PipelineStage(
            self.stage,
            self.rank.number,
            self.rank.count,
            device,
            input_args=(given,),
            output_args=(self.stage.output_like(shape, device),),
        )
        count = self.tuning.batch_size // self.tuning.micro_batch_size
        return Schedule1F1B(stage, count, loss_fn=self._loss_of_micro_batch, scale_grads=False)

    def _loss_of_micro_batch(self, logits: Tensor, targets: Tensor) -> Tensor:
        flat = logits.flatten(0, 1).float()
        return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum") / self._total

    def gradients(self, number: int) -> float:
        rows: list[Sequence[int]] = list(self.steps[number])
        self._total = self.num_learned(rows)
        rows += [[]] * (self.tuning.batch_size - len(rows))  # a shorter last step: rows without samples
        batch = make_batch(self.samples, rows, self.pad_token, width=self.tuning.length).to(self.rank.device)
        torch.manual_seed(seed_of(self.tuning.seed, number, self.rank.number))
        losses: list[Tensor] = []
        if self.stage.is_first:
            self._schedule.step(batch.tokens, positions=batch.positions)
        elif self.stage.is_last:
            self._schedule.step(positions=batch.positions, target=batch.targets, losses=losses)
        else:
            self._schedule.step(positions=batch.positions)
        loss = torch.zeros((), device=self.rank.device)
        for part in losses:
            loss += part.detach()
        dist.all_reduce(loss)
        return float(loss)

    def clip(self) -> None:
        """Clip to the norm over the adapters of all stages."""
        gradients = [one.grad for one in self.parameters.values() if one.grad is not None]
        clip_over_processes(gradients, self.tuning.max_grad_norm, self.rank.device)

    def resume(self, folder: Path) -> int:
        """Load the newest state that every stage has."""
        own = folder / f"stage-{self.rank.number}"
        common = set.intersection(*(set(steps) for steps in gather(saved_steps(own))))
        return self.continue_from(state_at(own, max(common), self.optimizer) if common else None)

    def keep(self, folder: Path, step: int) -> None:
        own = folder / f"stage-{self.rank.number}"
        own.mkdir(parents=True, exist_ok=True)
        save_state(own, self.state(step))

    def adapter_tensors(self) -> dict[str, Tensor] | None:
        """The adapters of all stages, as the whole model names them; with None peft writes them."""
        parts = gather({f"base_model.model.{name}": value.detach().cpu() for name, value in self.parameters.items()})
        return {name: value for part in parts for name, value in part.items()}
