"""`QuantizationRun`: quantizes a model block by block, each after the preceding ones.

`block` does the work of one block: read its float weights, round them (`BlockRounding`), keep the result in the run's
folder, and advance the calibration text (`BlockWalk`) through the rounded block. An interrupted run reads finished
blocks from the folder; the text goes through them again only if a later block needs it.
"""

from __future__ import annotations

import copy
import functools
import logging
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CheckpointError
from sparsebit.execution.run_folder import RunFolder
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.checkpoint.packed_folder import FinishedBlock, Measured
from sparsebit.llm.layers.float_weight import Weight
from sparsebit.llm.models.architectures import Architecture, Stages, linears
from sparsebit.llm.models.calibration_batches import Tokens, as_batches
from sparsebit.llm.models.input_scaling import ScaledInput
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.llm.process_group import Rank
from sparsebit.llm.quantizing.bit_allocation import NUM_SAMPLES, BitAllocation, allocate, bit_costs
from sparsebit.llm.quantizing.block_rounding import BlockRounding, fallback_of, put_block
from sparsebit.llm.quantizing.block_walk import BlockWalk
from sparsebit.llm.quantizing.end_to_end import EndToEnd, EndToEndTraining, result_part
from sparsebit.llm.quantizing.rounding import layer_format
from sparsebit.llm.recipe import Recipe
from sparsebit.records.model_folders import PackedLayer
from sparsebit.tensor_files import digest

log = logging.getLogger(__name__)
ALLOCATION = "bit_allocation.json"
_WHOLE = 1 << 30  # windows of a batch: all
_MOST_EDGES = 64  # between two stages: those of experts have hundreds of layers
_WEIGHTS = "weights"  # the checksum of a block's float weights, in its file of the run


@dataclass(frozen=True)
class ExpertCalibration:
    """`num_tokens`: calibration tokens that the layer has read. `fallback`: why and how it was rounded without them."""

    num_tokens: int
    fallback: str | None


class QuantizationRun:
    """The model with its current block, and the facts of the finished ones."""

    def __init__(
        self,
        skeleton: Skeleton,
        architecture: Architecture,
        recipe: Recipe,
        tokens: Tokens,
        batch_size: int,
        memory_budget: int,
        rank: Rank,
    ) -> None:
        self.rank = rank
        self.skeleton, self.architecture, self.recipe, self.tokens = skeleton, architecture, recipe, tokens
        sizes: dict[str, Any] = {"batch_size": batch_size, "memory_budget": memory_budget}
        shared = rank if recipe.needs_text else None  # without text there is no work to distribute
        needs_float = recipe.needs_float_inputs
        self.walk = BlockWalk(skeleton, architecture, tokens, with_float=needs_float, rank=shared, **sizes)
        self.sizes, self.batch_size = sizes, batch_size
        self.allocation: BitAllocation | None = None
        self.paths = [f"{architecture.blocks}.{number}" for number in range(self.walk.num_blocks)]
        self.formats: dict[str, LayerFormat] = {}
        self.layers: dict[str, PackedLayer] = {}
        self._last_stage: tuple[str, ...] = ()
        self.fused: list[tuple[str, ...]] = []
        self.sources: list[str] = []
        self.rounding = BlockRounding(self.walk, recipe, self.recipe_of, skeleton.stored_type)
        self.experts: dict[str, ExpertCalibration] = {}
        self.scaled_inputs: dict[str, ScaledInput] = {}
        self.num_resumed = 0
        self.trained: EndToEnd | None = None
        self._bits = self._weights = 0.0

    def settings(self, further: Tensor | None) -> dict[str, Any]:
        """Everything that decides the result, except the weights of the blocks, which are compared block by block.

        `further`: the windows of the training end to end, if there is one.
        """
        inside = f"{self.architecture.blocks}."
        outside = dict.fromkeys(file for name, file in self.skeleton.names.items() if not name.startswith(inside))
        rest = {file: self.skeleton.folder.tensor(file) for file in outside}
        dtype = self.skeleton.dtype
        return {
            **({} if dtype == torch.float32 else {"type of the calibration": str(dtype)}),
            "recipe": asdict(self.recipe),
            "tokens": [digest(dict(batch)) for batch in as_batches(self.tokens, _WHOLE)],
            **({} if further is None else {"tokens of the training end to end": digest({"tokens": further})}),
            "batch_size": self.batch_size,
            "config": self.skeleton.folder.config,
            "weights outside of the blocks": digest(rest),
        }

    def allocate(self, folder: RunFolder) -> None:
        """Choose the bits of each layer, if they are mixed; an interrupted run has its choice already."""
        if not self.recipe.is_mixed:
            return
        known = self.rank.from_first(lambda: folder.note(ALLOCATION))
        if known is not None:
            self.allocation = BitAllocation.from_json(known, str(folder.path / ALLOCATION))
            return
        assert isinstance(self.tokens, Tensor), "mixed bits are for text alone"
        first = self.tokens[:NUM_SAMPLES]
        walk = BlockWalk(self.skeleton, self.architecture, first, with_float=False, **self.sizes)
        found, average = bit_costs(walk, self.recipe, self.paths), self.recipe.average_bits
        assert average is not None
        chosen = self.rank.from_first(lambda: allocate(found.costs, found.num_weights, found.fused, average))
        self.rank.from_first(lambda: folder.keep_note(ALLOCATION, chosen.to_json()))
        self.allocation = chosen
        log.info("%.3f bits a weight in the mean, loss + %.4f nats", chosen.average_bits, chosen.cost)

    def recipe_of(self, layer: str) -> Recipe:
        """The recipe of a layer with its own number of bits."""
        return self.recipe if self.allocation is None else self.recipe.with_bits(self.allocation.layers[layer].bits)

    def block(self, number: int, folder: RunFolder, *, is_run: bool) -> None:
        """Quantize or read the next block, and compute the input of the one after it.

        `is_run`: this block or a later one is unfinished, so the calibration text must pass through it.
        """
        is_walked = is_run and self.recipe.needs_text
        if number == 0 and is_walked:
            self.walk.start()
        original = self.skeleton.fill(self.paths[number])
        _need_finite(original, self.paths[number])
        # A finished block is only used again if it was made from the same float weights.
        source = digest(dict(original.named_parameters()))
        finished = self.rank.from_first(lambda: _read(folder, number, source))
        stages = self._stages(original) if finished is None else finished.stages
        stored = {name: value.detach() for name, value in original.named_parameters()}
        # Again for a finished block: the float model's outputs then are the same, bit by bit.
        scales = self.rounding.smooth(original, stages, self.paths[number]) if is_walked else {}
        changed = copy.deepcopy(original) if is_run else original
        if is_walked:
            self.walk.run_float(original, stages, need_outputs=self.recipe.learns)
        if finished is None:
            found = self.rounding.round(original, changed, stages, self.paths[number], stored)
            rounded = replace(found, stages=stages, scales={**found.scales, **scales})

            def kept() -> FinishedBlock:
                tensors, facts = rounded.to_tensors()
                folder.write(number, tensors, {**facts, _WEIGHTS: source})
                return rounded

            finished = self.rank.from_first(kept)
        else:
            self.num_resumed += 1
        if is_walked:
            put_block(changed, finished)
            self.walk.advance(changed, stages, original)
        self.skeleton.empty(self.paths[number])
        self.skeleton.folder.close()
        self._note(number, source, finished, stages)

    def train(self, folder: RunFolder, tokens: Tensor) -> None:
        """Train all blocks together, after the last one was quantized, on windows of text."""
        walk = BlockWalk(self.skeleton, self.architecture, tokens, with_float=False, **self.sizes)
        facts = [{_WEIGHTS: source} for source in self.sources]
        block_of = functools.partial(self.finished, folder=folder)
        self.trained = EndToEndTraining(walk, self.paths, block_of, self.recipe.end_to_end, facts).run(folder)
        if self.trained.kept_step:  # errors were those of the layers before
            self.layers = {name: replace(one, error=None, nearest_error=None) for name, one in self.layers.items()}

    def finished(self, number: int, folder: RunFolder) -> FinishedBlock:
        """A block of this run, read from its folder."""
        part = number
        if self.trained is not None and self.trained.kept_step:
            part = result_part(number, len(self.paths), self.trained.steps, self.trained.kept_step)
        found = _read(folder, part, self.sources[number])
        if found is None:
            raise CheckpointError(f"{folder.path}: block {number} has vanished while the run was going on")
        return found

    def bits_per_weight(self) -> float:
        return self._bits / max(self._weights, 1)

    def _stages(self, block: nn.Module) -> Stages:
        if self.recipe.needs_text:
            return self.walk.stages(block)
        return self.architecture.stages_in(block) or tuple((name,) for name in linears(block))

    def _note(self, number: int, source: str, block: FinishedBlock, stages: Stages) -> None:
        self.sources.append(source)
        # Sorted: a block that was read from a file has its layers in another order than one that was just rounded.
        for name, weight in sorted(block.layers.items()):
            full = f"{self.paths[number]}.{name}"
            self.formats[full] = layer_format(weight, self.recipe)
            count = weight.out_features * weight.in_features
            self._weights += count
            self._bits += count * _bits_in_file(weight, self.formats[full])
            if name in block.tokens:
                rows = block.tokens[name]
                self.experts[full] = ExpertCalibration(rows, fallback_of(rows, weight.in_features, self.recipe))
        path = self.paths[number]
        self._note_layers(path, block, stages)
        self.scaled_inputs |= {f"{path}: {name}": scaled for name, scaled in block.scales.items()}
        self.fused += [tuple(f"{path}.{name}" for name in group) for group in self.architecture.fused_groups(stages)]

    def _note_layers(self, path: str, block: FinishedBlock, stages: Stages) -> None:
        """For the record, in the order of execution."""
        for stage in stages:
            after = self._last_stage if len(self._last_stage) * len(stage) <= _MOST_EDGES else ()
            for name in stage:
                weight, full = block.layers[name], f"{path}.{name}"
                kept, found = self.formats[full], block.measured.get(name, Measured(0))
                shape = (weight.out_features, weight.in_features)
                num_bytes = round(shape[0] * shape[1] * _bits_in_file(weight, kept) / 8)
                self.layers[full] = PackedLayer(
                    *(full, kept.kind, kept.bits, kept.group_size, kept.symmetric, shape, num_bytes),
                    *(found.float_bytes or None, found.error, found.nearest_error, after),
                )
            self._last_stage = tuple(f"{path}.{name}" for name in stage)


def _bits_in_file(weight: Weight, layer: LayerFormat) -> float:
    """Bits of a weight in the file, with its share of scales; dense codes take a byte each."""
    return weight.bits_per_weight + (8 - weight.bits if layer.is_dense else 0)


def _read(folder: RunFolder, number: int, source: str) -> FinishedBlock | None:
    """A finished block; None if it is not finished. `source`: the checksum of its float weights."""
    found = folder.read(number, {_WEIGHTS: source})
    return None if found is None else FinishedBlock.from_tensors(*found)


def _need_finite(block: nn.Module, path: str) -> None:
    for name, weight in block.named_parameters():
        if not weight.isfinite().all():
            raise CheckpointError(f"{path}.{name} has NaN or infinite values: the float model is damaged")
