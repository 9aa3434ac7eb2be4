"""Training with a pipeline: each process has some neighbouring blocks, and micro-batches pass through all (1F1B).

A process only holds the weights of its own stage, with the embeddings or the output layer at its ends. The other blocks
are placeholders without weights, so that names and numbers of blocks are those of the whole model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.execution.distributed import gather
from sparsebit.llm.checkpoint.packed_source import packed_source
from sparsebit.llm.finetuning.data.instructions import Sample
from sparsebit.llm.finetuning.data.sample_packing import IGNORED, Batch, check_packing, make_batch
from sparsebit.llm.finetuning.layers.packed_lora import blocks_path
from sparsebit.llm.finetuning.training_loop import (
    TrainingLoop,
    clip_over_processes,
    save_state,
    saved_steps,
    seed_of,
    state_at,
)
from sparsebit.llm.finetuning.tuning import Tuning
from sparsebit.llm.layers.quant_linear import QuantLinear
from sparsebit.llm.models.architectures import architecture_of, blocks_of
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.llm.process_group import Rank
from sparsebit.llm.running.loading import read_layer


class _LeftStage(Exception):
    """Ends a forward after the last block of the stage; its argument is the hidden states."""


class _OtherStage(nn.Module):
    """Replaces a block of another stage: before the stage, hidden states pass through; after it, the forward ends."""

    def __init__(self, block: nn.Module, *, is_behind: bool) -> None:
        super().__init__()
        self.is_behind = is_behind
        for name, value in vars(block).items():  # read by models, such as `attention_type`
            if not name.startswith("_") and isinstance(value, (str, int, bool)) and not hasattr(self, name):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.is_behind:
            raise _LeftStage(hidden_states)
        return hidden_states


class PipelineStageModule(nn.Module):
    """Tokens or hidden states `(rows, length, channels)` in, hidden states or logits out; with `positions`."""

    def __init__(self, model: Any, *, is_first: bool, is_last: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.model, self.is_first, self.is_last = model, is_first, is_last

    def forward(self, x: Tensor, *, positions: Tensor) -> Tensor:
        if x.is_meta:  # torch asks for the shapes before the first step
            return self.output_like(x.shape, x.device)
        given = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        if self.is_last:
            logits: Tensor = self.model(**given, position_ids=positions, use_cache=False).logits
            return logits
        try:
            self.model.base_model(**given, position_ids=positions, use_cache=False)
        except _LeftStage as left:
            hidden: Tensor = left.args[0]
            return hidden
        raise AssertionError("the forward did not reach the next stage")

    def output_like(self, shape: Sequence[int], device: torch.device | str) -> Tensor:
        """An empty tensor like the stage's output for this many rows and tokens."""
        config = self.model.config.get_text_config()
        width = config.vocab_size if self.is_last else config.hidden_size
        return torch.empty(*shape[:2], width, dtype=self.dtype, device=device, requires_grad=True)


def stage_blocks(num_blocks: int, number: int, count: int) -> range:
    """The blocks of a stage; the first stages have one more if they cannot be equal.

    >>> [list(stage_blocks(5, number, 2)) for number in range(2)]
    [[0, 1, 2], [3, 4]]
    """
    share, rest = divmod(num_blocks, count)
    start = number * share + min(number, rest)
    return range(start, start + share + (number < rest))


@torch.no_grad()
def load_stage(
    folder: str | os.PathLike[str], rank: Rank, *, dtype: torch.dtype, trust_remote_code: bool = False
) -> PipelineStageModule:
    """The stage of this process, with the weights that it needs and no others."""
    files = ModelFolder(folder)
    files.check_files()
    skeleton = Skeleton(files, dtype=dtype, device=rank.device, trust_remote_code=trust_remote_code)
    model = skeleton.model
    architecture = architecture_of(model)
    blocks = blocks_of(model, architecture)
    if len(blocks) < rank.count:
        raise ConfigError(f"{len(blocks)} blocks for a pipeline of {rank.count} processes; start fewer")
    own = stage_blocks(len(blocks), rank.number, rank.count)
    is_first, is_last = rank.number == 0, rank.number == rank.count - 1
    source = packed_source(skeleton)
    inside = tuple(f"{architecture.blocks}.{number}." for number in own)
    for name in (name for name in source.formats if name.startswith(inside)):
        layer = read_layer(source, name, model.get_submodule(name)).to(rank.device)
        if isinstance(layer, QuantLinear):
            layer.prepare(dtype)
        model.set_submodule(name, layer)
    for number, block in enumerate(blocks):
        if number not in own:
            blocks[number] = _OtherStage(block, is_behind=number >= own.stop)
    skeleton.fill("", without=_unused(model, is_first=is_first, is_last=is_last))
    model.tie_weights()
    skeleton.folder.close()
    stage = PipelineStageModule(model, is_first=is_first, is_last=is_last, dtype=dtype)
    _check_embeddings(stage, own, dtype, rank.device)
    return stage


def _unused(model: Any, *, is_first: bool, is_last: bool) -> list[str]:
    """Paths of embeddings and output layer, if the stage does not need them; tied ones are on every stage."""
    if dict(model.all_tied_weights_keys):
        return []
    parts = {model.get_input_embeddings(): is_first, model.get_output_embeddings(): is_last}
    return [name for name, part in model.named_modules() if part in parts and not parts[part]]


@torch.no_grad()
def _check_embeddings(stage: PipelineStageModule, own: range, dtype: torch.dtype, device: torch.device) -> None:
    """Raise for a model that changes its embeddings before the blocks, as it would do so again on every stage."""
    if stage.is_first:
        return

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _LeftStage(args[0] if args else kwargs["hidden_states"])

    model = stage.model
    hidden = torch.ones(1, 2, model.config.get_text_config().hidden_size, dtype=dtype, device=device)
    block = model.get_submodule(blocks_path(model))[own.start]
    with block.register_forward_pre_hook(look, with_kwargs=True):
        try:
            seen = stage(hidden, positions=torch.arange(2, device=hidden.device)[None])
        except _LeftStage as left:
            seen = left.args[0]
    if not torch.equal(seen, hidden):
        raise ConfigError(
            f"{type(model).__name__} changes its embeddings before the first block: it cannot be cut into stages; "
            "train it with data parallel processes"
        )


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
        own = self.stage, self.rank.number, self.rank.count, device
        stage = PipelineStage(*own, input_args=(given,), output_args=(self.stage.output_like(shape, device),))
        count = self.tuning.batch_size // self.tuning.micro_batch_size

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            flat = logits.flatten(0, 1).float()
            return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum") / self._total

        return Schedule1F1B(stage, count, loss_fn=loss, scale_grads=False)

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
