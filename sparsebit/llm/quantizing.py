"""`quantize`: a model folder to a packed folder, block by block, resumable, checked before it is kept."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.execution.value_store import MIB
from sparsebit.folders import staging_folder
from sparsebit.llm.architectures import Architecture, Stages, architecture_of, linears
from sparsebit.llm.bit_allocation import BitAllocation, allocate, need_solver
from sparsebit.llm.bit_costs import NUM_SAMPLES, bit_costs
from sparsebit.llm.block_rounding import BlockRounding, fallback_of, put_block
from sparsebit.llm.block_walk import BlockWalk
from sparsebit.llm.calibration_text import calibration_tokens
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.float_weight import GROUPS, FloatWeight, Weight
from sparsebit.llm.hub_classes import load_tokenizer
from sparsebit.llm.input_scaling import ScaledInput
from sparsebit.llm.load_check import LoadCheck, check_loading, need_reader, vllm_reasons
from sparsebit.llm.model_folder import ModelFolder
from sparsebit.llm.packed_folder import write_packed_folder
from sparsebit.llm.process_group import Rank, joined
from sparsebit.llm.recipe import Recipe
from sparsebit.llm.rotating import remove_rotated, rotated_beside
from sparsebit.llm.run_folder import FinishedBlock, RunFolder
from sparsebit.llm.separate_experts import experts_in, routers
from sparsebit.llm.skeleton import Skeleton
from sparsebit.progress import track
from sparsebit.tensor_files import digest

log = logging.getLogger(__name__)
ALLOCATION = "bit_allocation.json"


@dataclass(frozen=True)
class Calibration:
    """Which text a model is quantized on: `num_samples` windows of `length` tokens of `text`, drawn with `seed`."""

    text: Path
    num_samples: int = 64
    length: int = 512
    seed: int = 0
    chat_template: bool = False


@dataclass(frozen=True)
class ExpertCalibration:
    """`num_tokens`: of the calibration text that the layer has read. `fallback`: why and how it was rounded without."""

    num_tokens: int
    fallback: str | None


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
    memory_budget: int = 1024 * MIB,
    device: torch.device | str = "cpu",
    check: bool = True,
    trust_remote_code: bool = False,
) -> QuantizedModel:
    """Quantize the linear layers in the blocks of a causal language model and write a compressed-tensors folder.

    `model`: a folder as transformers keeps it, with safetensors. `output`: a folder that does not exist yet; it appears
    whole, after plain transformers has loaded it and computed our logits (`check`). One block at a time is in memory,
    and hidden states up to `memory_budget` bytes, the rest on disk. Finished blocks are kept in `OUTPUT.partial`: the
    same call continues an interrupted run behind the last one, with the same result.

    Embeddings, norms and the output layer stay as they are. With mixed bits, a pass over the model estimates what each
    number of bits costs each layer before the first block is quantized; `bit_allocation.json` in the folder tells it.

    Under torchrun the batches of calibration text are split over the processes and their second moments are summed, so
    that the result is that of one process; rank 0 writes.
    """
    started = time.monotonic()
    recipe = recipe or Recipe()
    source, target = ModelFolder(model), Path(output)
    if target.exists():
        raise ConfigError(f"output {target} exists; remove it or give another folder")
    if source.config.get("quantization_config"):
        raise ConfigError(f"{source.path} is quantized already; give the float model")
    if check:
        need_reader()
    if recipe.is_mixed:
        need_solver()
    with joined(device) as rank:
        result = _quantize(
            source, target, recipe, calibration, batch_size, memory_budget, rank, check, trust_remote_code
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
    check: bool,
    trust_remote_code: bool,
) -> QuantizedModel:
    """The part of `quantize` that all processes of torchrun do together."""
    if rank.count > 1 and recipe.method == "autoround":
        raise ConfigError(
            "method='autoround' in several processes: it learns on outputs of blocks, which are not exchanged; use one"
        )
    floats = source
    if recipe.rotate:
        size = recipe.columns_in_group
        rotated = rank.from_first(
            lambda: rotated_beside(target, floats, size, trust_remote_code=trust_remote_code).path
        )
        source = ModelFolder(rotated)
    skeleton = Skeleton(source, device=rank.device, trust_remote_code=trust_remote_code)
    architecture = architecture_of(skeleton.model)
    _check_experts(skeleton, recipe)
    tokens = _tokens(source, recipe, calibration, trust_remote_code)
    run = _Run(skeleton, architecture, recipe, tokens, batch_size, memory_budget, rank)
    partial, settings = target.with_name(f"{target.name}.partial"), run.settings()
    folder = rank.from_first(lambda: RunFolder(partial, settings))  # the others never touch its files
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
                (made / ALLOCATION).write_text(run.allocation.to_json() + "\n", encoding="utf-8")
            found = None
            if check:
                reasons = vllm_reasons(run.formats, run.fused)
                found = check_loading(made, tokens[:1, :128], reasons, trust_remote_code=trust_remote_code)
            os.replace(made, target)
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


class _Run:
    """The model on its way through the blocks, and what is known of the finished ones."""

    def __init__(
        self,
        skeleton: Skeleton,
        architecture: Architecture,
        recipe: Recipe,
        tokens: Tensor,
        batch_size: int,
        memory_budget: int,
        rank: Rank,
    ) -> None:
        self.rank = rank
        self.skeleton, self.architecture, self.recipe, self.tokens = skeleton, architecture, recipe, tokens
        self.walk = BlockWalk(
            skeleton,
            architecture,
            tokens,
            with_float=recipe.needs_float_inputs,
            batch_size=batch_size,
            memory_budget=memory_budget,
            rank=rank,
        )
        self.batch_size, self.memory_budget = batch_size, memory_budget
        self.allocation: BitAllocation | None = None
        self.paths = [f"{architecture.blocks}.{number}" for number in range(self.walk.num_blocks)]
        self.formats: dict[str, LayerFormat] = {}
        self.fused: list[tuple[str, ...]] = []
        self.sources: list[str] = []
        self.rounding = BlockRounding(self.walk, recipe, self.recipe_of, skeleton.stored_type)
        self.experts: dict[str, ExpertCalibration] = {}
        self.scaled_inputs: dict[str, ScaledInput] = {}
        self.num_resumed = 0
        self._bits = self._weights = 0.0

    def settings(self) -> dict[str, Any]:
        """What decides the numbers, besides the weights of the blocks, which are compared block by block."""
        outside = [file for name, file in self.skeleton.names.items() if not self._is_in_block(name)]
        rest = {file: self.skeleton.folder.tensor(file) for file in dict.fromkeys(outside)}
        return {
            "recipe": asdict(self.recipe),
            "tokens": digest({"tokens": self.tokens}),
            "batch_size": self.batch_size,
            "config": self.skeleton.folder.config,
            "weights outside of the blocks": digest(rest),
        }

    def _is_in_block(self, name: str) -> bool:
        return name.startswith(f"{self.architecture.blocks}.")

    def allocate(self, folder: RunFolder) -> None:
        """Choose the bits of each layer, if they are mixed; an interrupted run has chosen already."""
        if not self.recipe.is_mixed:
            return
        known = self.rank.from_first(lambda: folder.note(ALLOCATION))
        if known is not None:
            self.allocation = BitAllocation.from_json(known, str(folder.path / ALLOCATION))
            return
        walk = BlockWalk(
            self.skeleton,
            self.architecture,
            self.tokens[:NUM_SAMPLES],
            with_float=False,
            batch_size=self.batch_size,
            memory_budget=self.memory_budget,
        )
        found = bit_costs(walk, self.recipe, self.paths)
        assert self.recipe.average_bits is not None
        average = self.recipe.average_bits
        chosen = self.rank.from_first(lambda: allocate(found.costs, found.num_weights, found.fused, average))
        self.allocation = chosen
        self.rank.from_first(lambda: folder.keep_note(ALLOCATION, chosen.to_json()))
        log.info("%.3f bits a weight in the mean, loss + %.4f nats", self.allocation.average_bits, self.allocation.cost)

    def recipe_of(self, layer: str) -> Recipe:
        """The recipe of a layer with its own number of bits."""
        return self.recipe if self.allocation is None else self.recipe.with_bits(self.allocation.layers[layer].bits)

    def block(self, number: int, folder: RunFolder) -> None:
        """Quantize the next block, or read it if it is finished, and compute what the one behind it reads."""
        if number == 0 and self.recipe.needs_text:
            self.walk.start()
        original = self.skeleton.fill(self.paths[number])
        source = digest(dict(original.named_parameters()))
        finished = self.rank.from_first(lambda: folder.read(number, source))
        stages = self._stages(original)
        changed = copy.deepcopy(original)
        if self.recipe.needs_text:
            self.walk.run_float(original, stages)
        if finished is None:
            rounded = self.rounding.round(original, changed, stages, self.paths[number])

            def kept() -> FinishedBlock:
                folder.write(number, source, rounded)
                return rounded

            finished = self.rank.from_first(kept)
        else:
            self.num_resumed += 1
        put_block(changed, finished)
        if self.recipe.needs_text:
            self.walk.advance(changed, stages)
        self.skeleton.empty(self.paths[number])
        self.skeleton.folder.close()
        self._note(number, source, finished, stages)

    def ignored(self) -> list[str]:
        """The linear layers of the model that stay float, and what chooses the experts, which vLLM has as a layer."""
        every = [name for name, part in self.skeleton.model.named_modules() if type(part) is nn.Linear]
        return [*(name for name in every if name not in self.formats), *routers(self.skeleton)]

    def bits_per_weight(self) -> float:
        return self._bits / max(self._weights, 1)

    def _stages(self, block: nn.Module) -> Stages:
        if self.recipe.needs_text:
            return self.walk.stages(block)
        return self.architecture.stages_in(block) or tuple((name,) for name in linears(block))

    def _note(self, number: int, source: str, block: FinishedBlock, stages: Stages) -> None:
        self.sources.append(source)
        for name, weight in block.layers.items():
            full = f"{self.paths[number]}.{name}"
            self.formats[full] = _format_of(weight, self.recipe)
            count = weight.out_features * weight.in_features
            self._weights += count
            self._bits += count * weight.bits_per_weight
            if name in block.tokens:
                rows = block.tokens[name]
                self.experts[full] = ExpertCalibration(rows, fallback_of(rows, weight.in_features, self.recipe))
        for name, scaled in block.scales.items():
            self.scaled_inputs[f"{self.paths[number]}: {name}"] = scaled
        for group in self.architecture.fused_groups(stages):
            self.fused.append(tuple(f"{self.paths[number]}.{name}" for name in group))


def _format_of(weight: Weight, recipe: Recipe) -> LayerFormat:
    if isinstance(weight, FloatWeight):
        return LayerFormat(weight.bits, GROUPS[weight.kind], True, weight.kind)
    return LayerFormat(weight.bits, weight.group_size if recipe.group_size else 0, weight.symmetric)


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
            "symmetric=False with a model of experts: neither transformers nor vLLM reads zero points of experts; "
            "quantize with symmetric=True (--symmetric)"
        )


def _known(folder: RunFolder, number: int, sources: list[str]) -> FinishedBlock:
    found = folder.read(number, sources[number])
    if found is None:
        raise CheckpointError(f"{folder.path}: block {number} has vanished while the run was going on")
    return found


def _num_bytes(folder: ModelFolder) -> int:
    return sum(path.stat().st_size for path in dict.fromkeys(folder.files.values()))
