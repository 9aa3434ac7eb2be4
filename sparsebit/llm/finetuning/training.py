"""`finetune`: adapters of a packed model, trained on instructions; resumable, in one process or several.

The training itself is `TrainingLoop` (`training_loop.py`) or one of its two subclasses, for shards and for a pipeline.
States are kept in `OUTPUT.partial`, a `RunFolder` whose settings decide whether a run may continue; anything that
changes the result must be in `_settings`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.execution.run_folder import RunFolder, hold_run
from sparsebit.folders import need_new, put_in_place, staging_folder, write_text
from sparsebit.llm.finetuning.data.instructions import Sample, read_instructions
from sparsebit.llm.finetuning.distributed.pipeline_training import PipelineTraining, load_stage
from sparsebit.llm.finetuning.distributed.sharded_training import ShardedTraining
from sparsebit.llm.finetuning.layers.packed_lora import peft_module
from sparsebit.llm.finetuning.training_loop import TrainingLoop
from sparsebit.llm.finetuning.tuning import Tuning
from sparsebit.llm.models.calibration_text import need_embeddings, need_positions
from sparsebit.llm.models.file_checksums import fingerprint, write_checksums
from sparsebit.llm.models.hub_classes import load_tokenizer
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.process_group import Rank, joined
from sparsebit.llm.running.loading import load
from sparsebit.progress import track
from sparsebit.tensor_files import save_tensors

log = logging.getLogger(__name__)
RECORD = "training.json"
_NOT_COMPARED = ("transformers_version", "_name_or_path")  # entries of config.json without effect
Parallel = Literal["ddp", "fsdp", "pipeline"]
PARALLEL: tuple[Parallel, ...] = get_args(Parallel)


@dataclass(frozen=True)
class FinetunedModel:
    """The result of `finetune`. `losses`: of each step, the mean negative log-likelihood of a learned token.

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
    parallel: Parallel = "ddp",
    trust_remote_code: bool = False,
) -> FinetunedModel:
    """Train LoRA adapters on the frozen model of a folder, whose weights stay packed, and write them as peft does.

    `model`: a packed folder, or a float one. `data`: JSON lines, see `read_instructions`; only responses are learned.
    `output`: a folder that does not exist yet; it appears whole at the end. `dtype`: of activations and float weights;
    bfloat16 on a GPU, float32 on a CPU. Every `save_every` steps the state is kept in `OUTPUT.partial`, and the same
    call continues from there with the same result. Under torchrun, `parallel` is "ddp": the rows of each step are split
    over the processes; "fsdp": rows are split too, and each process keeps a share of every block, including packed
    weights; or "pipeline": each process has some of the blocks, and micro-batches pass through all of them (1F1B).
    """
    started = time.monotonic()
    tuning = tuning or Tuning()
    target = Path(output)
    need_new(target)
    if parallel not in PARALLEL or save_every < 1:
        known = ", ".join(PARALLEL)
        raise ConfigError(f"parallel={parallel!r}, save_every={save_every}: allowed: {known}; 1 or more")
    peft_module()
    tokenizer = load_tokenizer(Path(model), trust_remote_code=trust_remote_code)
    how: dict[str, Any] = {"chat_template": tuning.chat_template, "too_long": tuning.too_long}
    samples = read_instructions(Path(data), tokenizer, length=tuning.length, **how)
    with joined(device) as rank, ExitStack() as held:
        partial = rank.from_first(lambda: hold_run(target, held))
        dtype = dtype or (torch.float32 if rank.device.type == "cpu" else torch.bfloat16)
        if parallel != "ddp" and rank.count == 1:
            raise ConfigError(f"parallel={parallel!r} in one process: start several with torchrun, or leave it out")
        run = _run(model, samples, tuning, rank, dtype, parallel, trust_remote_code=trust_remote_code)
        stages = rank.count if parallel == "pipeline" else 1
        more = {"optimizer": run.optimizer_name, "stages": stages}
        rank.from_first(lambda: RunFolder(partial, _settings(tuning, samples, Path(model), dtype) | more).open())
        num_resumed = _train(run, partial, save_every, rank)
        tensors = run.adapter_tensors()
        trained = run.parameters if tensors is None else tensors
        found = FinetunedModel(
            *(target, tuning, run.optimizer_name, tuple(run.losses)),
            num_samples=len(samples),
            num_learned=sum(run.num_learned(rows) for rows in run.steps),
            num_parameters=sum(tensor.numel() for tensor in trained.values()),
            num_resumed=num_resumed,
            seconds=time.monotonic() - started,
        )
        rank.from_first(lambda: _write(target, run.peft_model, found, partial, tensors))
    log.info("%s: %d steps, loss %.4f -> %.4f", target, len(found.losses), found.losses[0], found.losses[-1])
    return found


def _run(
    model: str | os.PathLike[str],
    samples: Sequence[Sample],
    tuning: Tuning,
    rank: Rank,
    dtype: torch.dtype,
    parallel: Parallel,
    *,
    trust_remote_code: bool,
) -> TrainingLoop:
    """The training of this process, with its part of the model."""
    trust = trust_remote_code
    stage = load_stage(model, rank, dtype=dtype, trust_remote_code=trust) if parallel == "pipeline" else None
    where = torch.device("cpu") if parallel == "fsdp" else rank.device  # blocks to shard come there one by one
    backbone = load(model, dtype=dtype, device=where, trust_remote_code=trust) if stage is None else stage.model
    need_embeddings(torch.tensor(max((max(sample.tokens) for sample in samples), default=0)), backbone)
    need_positions(max(len(sample.tokens) for sample in samples), backbone)  # positions begin again at each
    # Padding is neither learned nor seen: token 0, since the padding token of a tokenizer may have no embedding.
    rest = samples, tuning, rank, 0, str(model)
    if stage is not None:
        return PipelineTraining(stage, *rest)
    return (ShardedTraining if parallel == "fsdp" else TrainingLoop)(backbone, *rest)


def _train(run: TrainingLoop, partial: Path, save_every: int, rank: Rank) -> int:
    """All steps that are left; returns how many an interrupted run had done."""
    num_resumed = run.resume(partial)
    with torch.random.fork_rng(devices=[rank.device] if rank.device.type == "cuda" else []):
        for step in track(range(num_resumed, run.num_steps), "fine-tuning"):
            run.step(step)
            if (step + 1) % save_every == 0:
                run.keep(partial, step + 1)
    return num_resumed


def _settings(tuning: Tuning, samples: Sequence[Sample], model: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Everything that decides the result: all bytes of the model's weights and code, its config, and the samples."""
    tokens = json.dumps([[sample.tokens, sample.is_learned] for sample in samples])
    folder = ModelFolder(model)
    config = {key: value for key, value in folder.config.items() if key not in _NOT_COMPARED}
    return {
        "tuning": asdict(tuning) | {"targets": list(tuning.targets)},
        "data": hashlib.sha256(tokens.encode()).hexdigest(),
        "model": fingerprint(model, [*folder.files.values(), *model.glob("*.py")], config),
        "dtype": str(dtype),
    }


def _write(
    target: Path, peft_model: Any, found: FinetunedModel, partial: Path, tensors: Mapping[str, Tensor] | None
) -> None:
    record = asdict(replace(found, folder=Path()))
    record.pop("folder")
    with staging_folder(target) as staging:
        made = staging / target.name
        given = {} if tensors is None else {"state_dict": dict(tensors)}
        try:
            peft_model.save_pretrained(str(made), safe_serialization=True, save_embedding_layers=False, **given)
        except SafetensorError as error:
            raise OSError(f"{made} cannot be written ({error}); the states of the training are kept") from None
        if tensors is not None:  # peft only writes the adapters of its own model: those of this stage
            whole = {name.replace(".default.", "."): value for name, value in tensors.items()}
            save_tensors(whole, made / "adapter_model.safetensors", {"format": "pt"})
        write_text(made / RECORD, json.dumps(record, indent=1) + "\n")
        write_checksums(made)
        put_in_place(made, target)
    shutil.rmtree(partial, ignore_errors=True)
