"""`quantize`: writes a model folder as a packed folder, block by block, resumable, checked before it is kept.

Everything that can fail is tried before the first block, since the work takes hours: the reader of the result, the
layers, the weights, the text. Under torchrun all processes run this code; `rank.from_first` is for work of the first
one only. `QuantizationRun.settings` holds everything besides the weights that decides the result: a run continues if
it is equal.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.execution.blocks.value_store import default_memory_budget
from sparsebit.execution.run_folder import RunFolder, has_begun, hold_run
from sparsebit.folders import need_new, put_in_place, staging_folder, write_text
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.checkpoint.packed_folder import write_packed_folder
from sparsebit.llm.checkpoint.packed_source import float_layers
from sparsebit.llm.converting.load_check import LoadCheck, check_loading, check_transposed, need_reader
from sparsebit.llm.converting.targets import cache_reasons, vllm_reasons
from sparsebit.llm.models.architectures import (
    architecture_of,
    block_linears,
    blocks_of,
    need_called_layers,
    need_loadable_layers,
    reads_images,
)
from sparsebit.llm.models.calibration_batches import IDS, Batch, Tokens, as_batches, checked_batches, num_tokens
from sparsebit.llm.models.calibration_text import DrawnText, draw_windows, need_embeddings, need_positions
from sparsebit.llm.models.file_checksums import write_checksums
from sparsebit.llm.models.hub_classes import load_tokenizer
from sparsebit.llm.models.hub_models import HubSource, hub_source, local_folder
from sparsebit.llm.models.input_scaling import ScaledInput
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.separate_experts import experts_in
from sparsebit.llm.models.skeleton import Skeleton, check_weights
from sparsebit.llm.process_group import Rank, joined
from sparsebit.llm.quantizing.bit_allocation import BitAllocation, need_solver
from sparsebit.llm.quantizing.block_rounding import warn_of_few_tokens, widest_layer
from sparsebit.llm.quantizing.cache_scales import need_cache, write_cache
from sparsebit.llm.quantizing.end_to_end import EndToEnd, need_two_batches, num_windows
from sparsebit.llm.quantizing.input_scales import write_input_scales
from sparsebit.llm.quantizing.quantization_run import ALLOCATION, ExpertCalibration, QuantizationRun
from sparsebit.llm.quantizing.reader_probe import need_readable, reads_unpacked
from sparsebit.llm.quantizing.rotating import remove_rotated, rotated_beside
from sparsebit.llm.recipe import Calibration, Recipe
from sparsebit.progress import track
from sparsebit.records import model_folders
from sparsebit.records.model_folders import PackedModel

log = logging.getLogger(__name__)
_SOURCE = "source.json"


@dataclass(frozen=True)
class QuantizedModel:
    """The result of `quantize`. Sizes in bytes of all weights in the files; `bits_per_weight`: of the quantized layers.

    `num_resumed`: blocks that an interrupted run had finished. `check`: None if it was switched off. `allocation`: of
    mixed bits. `experts`: how each expert layer was calibrated, by name; empty if no text was needed.
    `scaled_inputs`: for `awq`, how the input of each block's layers was scaled, or why it was not. `source`: name
    and commit of a model of the hub. `calibration_windows`: how many windows came from each text, by its path.
    `end_to_end`: of the training of all blocks together.
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
    source: HubSource | None = None
    calibration_windows: Mapping[str, int] = field(default_factory=dict)
    end_to_end: EndToEnd | None = None


def quantize(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    recipe: Recipe | None = None,
    calibration: Calibration | Sequence[Batch] | None = None,
    *,
    batch_size: int = 4,
    memory_budget: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    check: bool = True,
    trust_remote_code: bool = False,
) -> QuantizedModel:
    """Quantize the linear layers in the blocks of a causal language model and write a compressed-tensors folder.

    `calibration`: text; for a model with images also batches of its processor, mappings of tensors with `input_ids`,
    `pixel_values` and so on, without padding. The language part of such a model is quantized.

    `model`: a folder as transformers keeps it, with safetensors, or the name of a model of the Hugging Face hub,
    `org/name`, which is downloaded; `source.json` in the result holds its commit. `output`: a folder that does not
    exist yet; it appears whole, after plain transformers has loaded it and computed our logits (`check`). One block
    at a time is in memory, and hidden states up to `memory_budget` bytes, the rest on disk; by default half of the
    free memory, from 1 to 8 GiB. `dtype`: in which the blocks compute hidden states. Half types are for
    `rtn` and `gptq` on a GPU, where they are faster and take half of the memory; second moments and weights are
    float32 and float64 in any case. Finished blocks are kept in `OUTPUT.partial`: the same call continues an
    interrupted run after the last one, with the same result.

    Embeddings, norms and the output layer are not changed. With mixed bits, a pass over the model estimates the cost of
    each number of bits in each layer before the first block is quantized; `bit_allocation.json` in the folder lists it.

    Under torchrun the batches of calibration text are split over the processes and their second moments are summed, so
    that the result is that of one process; rank 0 writes.
    """
    started = time.monotonic()
    recipe = recipe or Recipe()
    target = Path(output)
    need_new(target)
    source = ModelFolder(local_folder(model))
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
    job = _Job(source, target, recipe, calibration, batch_size, memory_budget, dtype, check, trust_remote_code)
    with joined(device) as rank, contextlib.ExitStack() as held:
        result = _quantize(job, rank, held)
    log.info(
        "%s: %d layers, %.2f bits a weight, %.1f MB of %.1f MB",
        *(target, len(result.formats), result.bits_per_weight, result.packed_bytes / 1e6, result.float_bytes / 1e6),
    )
    return replace(result, seconds=time.monotonic() - started)


@dataclass(frozen=True)
class _Job:
    """The arguments of `quantize`."""

    source: ModelFolder
    target: Path
    recipe: Recipe
    calibration: Calibration | Sequence[Batch] | None
    batch_size: int
    memory_budget: int
    dtype: torch.dtype
    check: bool
    trust_remote_code: bool

    def skeleton(self, folder: ModelFolder, rank: Rank) -> Skeleton:
        return Skeleton(folder, dtype=self.dtype, device=rank.device, trust_remote_code=self.trust_remote_code)


def _quantize(job: _Job, rank: Rank, held: contextlib.ExitStack) -> QuantizedModel:
    """The part of `quantize` that all processes of torchrun do together."""
    recipe = job.recipe
    alone = [name for name in ("smooth", "end_to_end") if getattr(recipe, name)]
    if rank.count > 1 and (recipe.learns or alone):
        given = f"{alone[0]}={getattr(recipe, alone[0])}" if alone else f"method={recipe.method!r}"
        raise ConfigError(f"{given} in several processes: outputs of blocks are not exchanged; use one")
    origin = hub_source(job.source.path)
    partial = rank.from_first(lambda: hold_run(job.target, held))  # the others never touch its files
    skeleton = _checked_skeleton(job, partial, rank)
    architecture = architecture_of(skeleton.model)
    blocks = blocks_of(skeleton.model, architecture)
    shares: Mapping[str, int] = {}
    tokens: Tokens
    if isinstance(job.calibration, Calibration | None):
        drawn = _tokens(job, job.calibration, skeleton.model, widest_layer(blocks))
        tokens, shares = drawn.tokens, drawn.shares
    else:
        tokens = checked_batches(job.calibration)
    for batch in as_batches(tokens, job.batch_size):
        need_embeddings(batch[IDS], skeleton.model)
        need_positions(batch[IDS].shape[1], skeleton.model)
    warn_of_few_tokens(blocks, num_tokens(tokens), recipe)
    further = _further_tokens(job, skeleton)
    run = QuantizationRun(skeleton, architecture, recipe, tokens, job.batch_size, job.memory_budget, rank)
    settings = run.settings(further)
    folder = rank.from_first(lambda: RunFolder(partial, settings).open())
    run.allocate(folder)
    numbers = range(run.walk.num_blocks)
    # The first blocks must be run, up to the last unfinished one.
    num_to_do = rank.from_first(lambda: max((n + 1 for n in numbers if not folder.file(n).is_file()), default=0))
    for number in track(numbers, "quantizing blocks"):
        run.block(number, folder, is_run=number < num_to_do)
    if further is not None:
        run.train(folder, further)
    checked = rank.from_first(lambda: _write(job, run, folder, origin))
    packed_bytes = rank.from_first(lambda: _num_bytes(ModelFolder(job.target)))
    return QuantizedModel(
        *(job.target, recipe, run.formats, _num_bytes(job.source), packed_bytes, run.bits_per_weight()),
        num_resumed=run.num_resumed,
        seconds=0.0,
        check=checked,
        allocation=run.allocation,
        experts=run.experts,
        scaled_inputs=run.scaled_inputs,
        source=origin,
        calibration_windows=shares,
        end_to_end=run.trained,
    )


def _checked_skeleton(job: _Job, partial: Path, rank: Rank) -> Skeleton:
    """The model without weights, rotated if the recipe requires it; a model that cannot be quantized is an error."""
    recipe, skeleton = job.recipe, job.skeleton(job.source, rank)
    skeleton.check_unused()
    layers = block_linears(skeleton.model, architecture_of(skeleton.model))
    need_called_layers(skeleton.model, layers)
    if job.check and not skeleton.transposed and not reads_unpacked(recipe):  # transformers will load them packed
        need_loadable_layers(skeleton.model, layers)
    _check_experts(skeleton, recipe)
    _check_images(skeleton, job)
    need_cache(skeleton, recipe)
    # A run that continues has scanned the weights before.
    rank.from_first(lambda: check_weights(skeleton, scan=not has_begun(partial)))
    if recipe.rotate:
        size, trust = recipe.columns_in_group, job.trust_remote_code
        rotated = rank.from_first(lambda: rotated_beside(job.target, job.source, size, trust_remote_code=trust).path)
        skeleton = job.skeleton(ModelFolder(rotated), rank)
    if job.check and not skeleton.transposed:
        rank.from_first(lambda: need_readable(recipe, has_experts=bool(experts_in(skeleton.model))))
    return skeleton


def _write(job: _Job, run: QuantizationRun, folder: RunFolder, origin: HubSource | None) -> LoadCheck | None:
    """The packed folder, checked before it gets its name."""
    skeleton, target, trust = run.skeleton, job.target, job.trust_remote_code
    text = run.tokens[:1, :128] if isinstance(run.tokens, Tensor) else run.tokens[0]
    with staging_folder(target) as staging:
        made = staging / target.name
        block_of = functools.partial(run.finished, folder=folder)
        write_packed_folder(made, skeleton, run.paths, block_of, run.formats, float_layers(skeleton, run.formats))
        for_scales: dict[str, Any] = {"device": skeleton.device, "trust_remote_code": trust}
        write_input_scales(made, run.recipe.inputs, run.tokens, run.batch_size, **for_scales)
        if isinstance(run.tokens, Tensor):  # with images the cache stays float
            write_cache(made, run.recipe, run.tokens, run.batch_size, **for_scales)
        if origin is not None:
            write_text(made / _SOURCE, json.dumps(asdict(origin), indent=1) + "\n")
        if run.allocation is not None:
            write_text(made / ALLOCATION, run.allocation.to_json() + "\n")
        write_text(made / model_folders.FILE, _record(job, run).to_json())
        write_checksums(made)
        found = None
        if job.check and skeleton.transposed:
            assert isinstance(text, Tensor), "no model with transposed layers reads images"
            found = check_transposed(made, skeleton.folder.path, text, trust_remote_code=trust)
        elif job.check:
            reasons = (*vllm_reasons(run.formats, run.fused), *cache_reasons(run.recipe.kv_cache))
            found = check_loading(made, text, reasons, trust_remote_code=trust)
        put_in_place(made, target)
    folder.remove()
    if job.recipe.rotate:
        remove_rotated(target)
    return found


def _record(job: _Job, run: QuantizationRun) -> PackedModel:
    recipe = run.recipe
    return PackedModel(
        recipe={name: value for name, value in asdict(recipe).items() if value is not None},
        layers=tuple(run.layers.values()),
        float_bytes=_num_bytes(job.source),
        bits_per_weight=run.bits_per_weight(),
        measured_on="outputs" if recipe.needs_moments else "weights",
        num_windows=len(run.tokens) if recipe.needs_moments else 0,
    )


def check_dtype(dtype: torch.dtype, recipe: Recipe) -> None:
    """Raise for types in which a method does not compute hidden states."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"dtype={dtype}: allowed: float32, bfloat16, float16")
    if dtype != torch.float32 and (recipe.method not in ("rtn", "gptq") or recipe.is_mixed or recipe.end_to_end):
        given = "mixed bits" if recipe.is_mixed else f"method={recipe.method!r}"
        given = f"end_to_end={recipe.end_to_end}" if recipe.end_to_end else given
        raise ConfigError(f"dtype={dtype} with {given}: these compute in float32; half types are for rtn and gptq")


def _tokens(job: _Job, calibration: Calibration | None, model: Any, widest: int) -> DrawnText:
    """The calibration tokens; without text, a few arbitrary ones, on which the packed model is checked."""
    recipe = job.recipe
    if calibration is None and recipe.needs_text:
        given = f"method {recipe.method!r} with scale_search={recipe.scale_search!r}, smooth={recipe.smooth}"
        raise ConfigError(f"{given} needs calibration text: give some, or method 'rtn' without a scale search")
    if calibration is None and recipe.calibrates_cache:
        raise ConfigError(f"kv_cache={recipe.kv_cache!r} needs calibration text for its scales: give some, or use int4")
    if calibration is None and recipe.inputs is not None and recipe.inputs.is_calibrated:
        raise ConfigError(f"activations={recipe.activations!r} needs calibration text for its scales: give some")
    if calibration is None:
        size = int(getattr(model.config.get_text_config(decoder=True), "vocab_size", 32))
        return DrawnText(torch.randint(0, size, (1, 64), generator=torch.Generator().manual_seed(0)), {})
    tokenizer = load_tokenizer(job.source.path, trust_remote_code=job.trust_remote_code)
    return draw_windows(
        *(calibration.texts, tokenizer),
        num_samples=calibration.num_samples,
        length=calibration.length,
        widest=widest,
        seed=calibration.seed,
        chat_template=calibration.chat_template,
    )


def _further_tokens(job: _Job, skeleton: Skeleton) -> Tensor | None:
    """The windows of the training end to end: as many as its steps read, if the text has them."""
    calibration, steps = job.calibration, job.recipe.end_to_end
    if not steps:
        return None
    if not isinstance(calibration, Calibration):
        raise ConfigError(f"end_to_end={steps} needs calibration text: give some")
    tokenizer = load_tokenizer(skeleton.folder.path, trust_remote_code=job.trust_remote_code)
    drawn = draw_windows(
        *(calibration.texts, tokenizer),
        num_samples=num_windows(steps, job.batch_size),
        length=calibration.length,
        widest=0,
        seed=calibration.seed,
        chat_template=calibration.chat_template,
        is_limit=True,
    )
    need_embeddings(drawn.tokens, skeleton.model)
    need_two_batches(drawn.tokens, job.batch_size)
    return drawn.tokens


def _check_experts(skeleton: Skeleton, recipe: Recipe) -> None:
    """Raise for number formats of experts that transformers does not read."""
    problem = None
    if recipe.method == "nvfp4":
        problem = "method='nvfp4'", "the global scales of experts; use mxfp4, fp8, or whole numbers"
    elif recipe.inputs is not None:
        problem = f"activations={recipe.activations!r}", "rounded inputs of experts; leave them float, or use fp8"
    elif not recipe.symmetric and recipe.float_kind is None:
        problem = "symmetric=False", "zero points of experts; quantize with symmetric=True (--symmetric)"
    if problem is not None and experts_in(skeleton.model):
        raise ConfigError(f"{problem[0]} with a model of experts: transformers does not read {problem[1]}")


def _check_images(skeleton: Skeleton, job: _Job) -> None:
    """Raise for what is not there for models with images, or for calibration with images."""
    recipe, with_batches = job.recipe, not isinstance(job.calibration, Calibration | None)
    given = [name for name in ("rotate",) if getattr(recipe, name)]
    given += [f"kv_cache={recipe.kv_cache!r}"] if recipe.kv_cache != "float" else []
    given += ["mixed bits"] if recipe.is_mixed else []
    given += ["method='autoround'"] if recipe.method == "autoround" else []
    if given and (with_batches or reads_images(skeleton.model)):
        raise ConfigError(f"{', '.join(given)} with images: not supported; leave it out")


def _num_bytes(folder: ModelFolder) -> int:
    return sum(path.stat().st_size for path in dict.fromkeys(folder.files.values()))
