"""`quantize`: a model folder to a packed folder, block by block, resumable, checked before it is kept."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.execution.value_store import default_memory_budget
from sparsebit.folders import need_new, put_in_place, staging_folder, write_text
from sparsebit.llm.architectures import architecture_of, blocks_of, linears
from sparsebit.llm.bit_allocation import BitAllocation, need_solver
from sparsebit.llm.block_rounding import tell_few_tokens
from sparsebit.llm.calibration_text import calibration_tokens, need_embeddings, need_positions
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.file_checksums import write_checksums
from sparsebit.llm.hub_classes import load_tokenizer
from sparsebit.llm.input_scaling import ScaledInput
from sparsebit.llm.load_check import LoadCheck, check_loading, need_reader
from sparsebit.llm.model_folder import ModelFolder
from sparsebit.llm.packed_folder import write_packed_folder
from sparsebit.llm.process_group import Rank, joined
from sparsebit.llm.quantization_run import ALLOCATION, ExpertCalibration, QuantizationRun
from sparsebit.llm.recipe import Recipe
from sparsebit.llm.rotating import remove_rotated, rotated_beside
from sparsebit.llm.run_folder import FinishedBlock, RunFolder, hold_run
from sparsebit.llm.separate_experts import experts_in
from sparsebit.llm.skeleton import Skeleton
from sparsebit.llm.vllm_rules import vllm_reasons
from sparsebit.progress import track

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Calibration:
    """Which text a model is quantized on: `num_samples` windows of `length` tokens of `text`, drawn with `seed`."""

    text: Path
    num_samples: int = 64
    length: int = 512
    seed: int = 0
    chat_template: bool = False

    def __post_init__(self) -> None:
        for name, least in (("num_samples", 1), ("length", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}: allowed: {least} or more")


@dataclass(frozen=True)
class QuantizedModel:
    """What `quantize` made. Sizes in bytes of all weights in the files; `bits_per_weight`: of the quantized layers.

    `num_resumed`: blocks that an interrupted run had finished. `check`: None, if it was switched off. `allocation`: of
    mixed bits. `experts`: how each layer of an expert was calibrated, by name; empty where no text was needed.
    `scaled_inputs`: of `awq`, how the input of each block's layers was scaled, or why it was not.
    """

    folder: Path
    recipe: Recipe
    formats: Mapping[str, LayerFormat]
    float_bytes: int
    packed_bytes: int
    bits_per_weight: float
    num_resumed: int
    seconds: float
    check: LoadCheck | None
    allocation: BitAllocation | None = None
    experts: Mapping[str, ExpertCalibration] = field(default_factory=dict)
    scaled_inputs: Mapping[str, ScaledInput] = field(default_factory=dict)


def quantize(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    recipe: Recipe | None = None,
    calibration: Calibration | None = None,
    *,
    batch_size: int = 4,
    memory_budget: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    check: bool = True,
    trust_remote_code: bool = False,
) -> QuantizedModel:
    """Quantize the linear layers in the blocks of a causal language model and write a compressed-tensors folder.

    `model`: a folder as transformers keeps it, with safetensors. `output`: a folder that does not exist yet; it appears
    whole, after plain transformers has loaded it and computed our logits (`check`). One block at a time is in memory,
    and hidden states up to `memory_budget` bytes, the rest on disk; by default half of the memory that is free, from 1
    to 8 GiB. `dtype`: in which the blocks compute hidden states. Half types are for `rtn` and `gptq` on a GPU, where
    they are faster and take half of the memory; second moments and weights are float32 and float64 all the same.
    Finished blocks are kept in `OUTPUT.partial`: the
    same call continues an interrupted run behind the last one, with the same result.

    Embeddings, norms and the output layer stay as they are. With mixed bits, a pass over the model estimates what each
    number of bits costs each layer before the first block is quantized; `bit_allocation.json` in the folder tells it.

    Under torchrun the batches of calibration text are split over the processes and their second moments are summed, so
    that the result is that of one process; rank 0 writes.
    """
    started = time.monotonic()
    recipe = recipe or Recipe()
    source, target = ModelFolder(model), Path(output)
    need_new(target)
    if source.config.get("quantization_config"):
        raise ConfigError(f"{source.path} is quantized already; give the float model")
    source.check_files()
    if check:
        need_reader(recipe.candidate_bits or (recipe.bits,))
    if recipe.is_mixed:
        need_solver()
    check_dtype(dtype, recipe)
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: allowed: 1 or more")
    memory_budget = default_memory_budget() if memory_budget is None else memory_budget
    with joined(device) as rank, contextlib.ExitStack() as held:
        result = _quantize(
            source, target, recipe, calibration, batch_size, memory_budget, rank, held, dtype, check, trust_remote_code
        )
    log.info(
        "%s: %d layers, %.2f bits a weight, %.1f MB of %.1f MB",
        target,
        len(result.formats),
        result.bits_per_weight,
        result.packed_bytes / 1e6,
        result.float_bytes / 1e6,
    )
    return replace(result, seconds=time.monotonic() - started)


def _quantize(
    source: ModelFolder,
    target: Path,
    recipe: Recipe,
    calibration: Calibration | None,
    batch_size: int,
    memory_budget: int,
    rank: Rank,
    held: contextlib.ExitStack,
    dtype: torch.dtype,
    check: bool,
    trust_remote_code: bool,
) -> QuantizedModel:
    """The part of `quantize` that all processes of torchrun do together."""
    if rank.count > 1 and recipe.method == "autoround":
        raise ConfigError(
            "method='autoround' in several processes: it learns on outputs of blocks, which are not exchanged; use one"
        )
    floats = source
    partial = rank.from_first(lambda: hold_run(target, held))  # the others never touch its files
    if recipe.rotate:
        size = recipe.columns_in_group
        rotated = rank.from_first(
            lambda: rotated_beside(target, floats, size, trust_remote_code=trust_remote_code).path
        )
        source = ModelFolder(rotated)
    skeleton = Skeleton(source, dtype=dtype, device=rank.device, trust_remote_code=trust_remote_code)
    skeleton.tell_unused()
    architecture = architecture_of(skeleton.model)
    for block in blocks_of(skeleton.model, architecture):
        linears(block)  # refuses blocks that it does not know before anything runs
    _check_experts(skeleton, recipe)
    tokens = _tokens(source, recipe, calibration, trust_remote_code)
    need_embeddings(tokens, skeleton.model)
    need_positions(tokens.shape[1], skeleton.model)
    tell_few_tokens(blocks_of(skeleton.model, architecture), tokens.numel(), recipe)
    run = QuantizationRun(skeleton, architecture, recipe, tokens, batch_size, memory_budget, rank)
    settings = run.settings()
    folder = rank.from_first(lambda: RunFolder(partial, settings))
    run.allocate(folder)
    for number in track(range(run.walk.num_blocks), "quantizing blocks"):
        run.block(number, folder)

    def write() -> LoadCheck | None:
        with staging_folder(target) as staging:
            made = staging / target.name
            write_packed_folder(
                made,
                skeleton,
                run.paths,
                lambda number: _known(folder, number, run.sources),
                run.formats,
                run.ignored(),
            )
            if run.allocation is not None:
                write_text(made / ALLOCATION, run.allocation.to_json() + "\n")
            write_checksums(made)
            found = None
            if check:
                reasons = vllm_reasons(run.formats, run.fused)
                found = check_loading(made, tokens[:1, :128], reasons, trust_remote_code=trust_remote_code)
            put_in_place(made, target)
        folder.remove()
        if recipe.rotate:
            remove_rotated(target)
        return found

    checked = rank.from_first(write)
    return QuantizedModel(
        target,
        recipe,
        run.formats,
        _num_bytes(floats),
        rank.from_first(lambda: _num_bytes(ModelFolder(target))),
        run.bits_per_weight(),
        run.num_resumed,
        0.0,
        checked,
        run.allocation,
        run.experts,
        run.scaled_inputs,
    )


def check_dtype(dtype: torch.dtype, recipe: Recipe) -> None:
    """Refuse types in which a method does not compute hidden states."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"dtype={dtype}: allowed: float32, bfloat16, float16")
    if dtype != torch.float32 and (recipe.method not in ("rtn", "gptq") or recipe.is_mixed):
        given = "mixed bits" if recipe.is_mixed else f"method={recipe.method!r}"
        raise ConfigError(f"dtype={dtype} with {given}: these compute in float32; half types are for rtn and gptq")


def _tokens(source: ModelFolder, recipe: Recipe, calibration: Calibration | None, trust_remote_code: bool) -> Tensor:
    """The calibration tokens; without text, a few arbitrary ones, on which the packed model is checked."""
    if calibration is None:
        if recipe.needs_text:
            raise ConfigError(
                f"method {recipe.method!r} with scale_search={recipe.scale_search!r} needs calibration text: give "
                "some, or method 'rtn' without a scale search"
            )
        size = int(source.config.get("vocab_size", 32))
        return torch.randint(0, size, (1, 64), generator=torch.Generator().manual_seed(0))
    tokenizer = load_tokenizer(source.path, trust_remote_code=trust_remote_code)
    wanted = replace(calibration, text=Path(calibration.text))
    return calibration_tokens(
        wanted.text,
        tokenizer,
        num_samples=wanted.num_samples,
        length=wanted.length,
        seed=wanted.seed,
        chat_template=wanted.chat_template,
    )


def _check_experts(skeleton: Skeleton, recipe: Recipe) -> None:
    """Refuse number formats of experts that transformers does not read."""
    if not experts_in(skeleton.model):
        return
    if recipe.method == "nvfp4":
        raise ConfigError(
            "method='nvfp4' with a model of experts: transformers does not read the global scales of experts; use "
            "mxfp4, fp8, or whole numbers"
        )
    if not recipe.symmetric and recipe.float_kind is None:
        raise ConfigError(
            "symmetric=False with a model of experts: transformers does not read zero points of experts; "
            "quantize with symmetric=True (--symmetric)"
        )


def _known(folder: RunFolder, number: int, sources: list[str]) -> FinishedBlock:
    found = folder.read(number, sources[number])
    if found is None:
        raise CheckpointError(f"{folder.path}: block {number} has vanished while the run was going on")
    return found


def _num_bytes(folder: ModelFolder) -> int:
    return sum(path.stat().st_size for path in dict.fromkeys(folder.files.values()))
