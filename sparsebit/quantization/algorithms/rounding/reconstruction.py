"""Reconstruction of a calibrated model: rounding, scales and biases are trained block by block, so that each block's
output stays near that of the float model.

AdaRound, BRECQ, QDrop, AutoRound and distillation are settings of this one procedure (`METHODS`). The arithmetic is in
`numerics/rounding/learned_codes.py`, the training loop in `execution/blocks/training.py`, what is learned at each
quantizer in `learned_sites.py`. A block whose error on held-out samples does not fall is restored, so the result is
never worse there than before.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.execution.blocks.engine import BatchValues, BlockData
from sparsebit.execution.blocks.runner import Values
from sparsebit.execution.blocks.training import BlockTraining, block_seed, mean_distance, squared_error, train_block
from sparsebit.execution.blocks.value_store import MIB
from sparsebit.execution.held_out import HoldOut
from sparsebit.numerics.rounding.learned_codes import RoundingKind
from sparsebit.quantization.algorithms.layer_visits import folder_of, num_owners, weights_outside
from sparsebit.quantization.algorithms.registration import register_algorithm
from sparsebit.quantization.algorithms.rounding.learned_sites import (
    LearnedSites,
    Rates,
    Settings,
    Unit,
    find_sites,
    in_place,
)
from sparsebit.quantization.algorithms.rounding.output_sensitivity import OutputSensitivity
from sparsebit.quantization.calibrating.block_visits import block_state, load_block_state
from sparsebit.quantization.model.quant_model import QuantModel

log = logging.getLogger(__name__)

Method = Literal["adaround", "brecq", "qdrop", "autoround", "distill"]
# How far all steps together can move the rounding of a weight, in codes; divided by the number of steps, it is the
# default learning rate. With more, signed steps oscillate between codes.
_TRAVEL: dict[RoundingKind, float] = {"sigmoid": 5.0, "sign": 0.3, "latent": 0.8, "none": 0.0}
# Without held-out samples: the error of weights that an earlier algorithm fitted to the same samples is too optimistic,
# so a larger one is accepted, up to this factor.
_MARGIN = 1.5
METHODS: dict[Method, Settings] = {
    "adaround": Settings("layers", "sigmoid", False, False, False, 0.0, False),
    "brecq": Settings("blocks", "sigmoid", True, False, False, 0.0, True),
    "qdrop": Settings("blocks", "sigmoid", True, False, False, 0.5, False),
    "autoround": Settings("blocks", "sign", False, True, False, 0.0, False),
    "distill": Settings("network", "latent", True, True, True, 0.0, False),
}


@dataclass(frozen=True)
class BlockReconstruction:
    """The squared error of one block's output relative to the float output's energy, before and after, and how many of
    the weights' codes changed.

    `before`, `after`: on the training samples, initially and now. `held_before`, `held_after`: on the held-out samples,
    initially and after training; None if no sample was held out. `is_kept`: whether the trained values are kept;
    otherwise the block was restored.
    """

    before: float
    after: float
    num_changed: int
    held_before: float | None = None
    held_after: float | None = None
    is_kept: bool = True


@dataclass(frozen=True)
class _Options:
    settings: Settings
    training: BlockTraining
    rates: Rates
    penalty: float
    hold_out: HoldOut


@register_algorithm("reconstruct")
def reconstruct(
    qmodel: QuantModel,
    data: Any,
    *,
    method: Method = "qdrop",
    blocks: Unit | tuple[str, ...] | None = None,
    steps: Annotated[int, Field(ge=1)] = 500,
    batch_size: Annotated[int, Field(ge=1)] = 32,
    rounding: RoundingKind | None = None,
    lr: Annotated[float, Field(ge=0)] | None = None,
    scale_lr: Annotated[float, Field(ge=0)] = 1e-3,
    bias_lr: Annotated[float, Field(ge=0)] = 1e-3,
    learn_step_sizes: bool | None = None,
    learn_weight_scales: bool | None = None,
    learn_biases: bool | None = None,
    drop: Annotated[float, Field(ge=0, le=1)] | None = None,
    fisher: bool | None = None,
    float_share: Annotated[float, Field(ge=0, le=1)] = 0.0,
    penalty: Annotated[float, Field(ge=0)] = 100.0,
    patience: Annotated[int, Field(ge=0)] = 0,
    bf16: bool = False,
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.125,
    views: Annotated[int, Field(ge=1)] = 1,
    seed: int = 0,
    memory_budget: int = 1024 * MIB,
    resume: str | os.PathLike[str] | None = None,
) -> dict[str, BlockReconstruction]:
    """Train rounding and scales of a calibrated model, in place, on `data` (batches as for calibration, no labels).

    Blocks are visited in order, each with the inputs from the quantized blocks before it; returns the result of each.
    It starts with the current codes, so it continues from the result of `gptq`. A block whose error on held-out samples
    did not fall is restored. Weights that cannot be learned (tied or computed ones) are unchanged, and are logged.

    `method`: a set of defaults, which can be set separately. "adaround": each layer, rounding alone. "brecq": blocks,
    step sizes of activations too, `fisher`. "qdrop": blocks, step sizes too, `drop`. "autoround": blocks, sign-gradient
    rounding and scales of weights. "distill": the whole network: weights (any code), scales, step sizes and biases.
    `blocks`: "layers", "blocks" (found in the graph), "network" (against the float model's outputs), or module paths.
    `steps`: per block. `batch_size`: samples of a step. `rounding`: "sigmoid" (AdaRound), "sign" (AutoRound), "latent"
    (the weights themselves, straight-through: any code), or "none" (codes stay). `lr`: of the rounding, in codes; by
    default what moves a weight by one code in all steps. `scale_lr`: of step sizes and scales, as a share of them.
    `bias_lr`: of biases, relative to the norm of the weight's rows. `learn_step_sizes`: learn the step sizes of
    activations. `learn_weight_scales`: learn the scales of weights. `learn_biases`: learn biases. `drop`: share of each
    activation's elements that a training step keeps in float. `fisher`: weigh errors by their effect on the network's
    output. `float_share`: share of the inputs' elements that come from the float model. `penalty`: weight of the
    sigmoid rounding's regularizer. `patience`: stop a block when its loss has not fallen for so many tenths of the
    steps; 0: never. `bf16`: compute in bfloat16 on a GPU. `held_out`: share of the samples (at least 8 or a quarter, at
    most 64) that are not trained on and decide which blocks are restored; with 0, or of fewer than 4, the others do.
    `views`: learn from so many views of each image (N, C, H, W): itself, and mirrored copies, shifted by up to an
    eighth. `seed`: two runs with one seed have equal bits. `memory_budget`: bytes of activations in memory; others are
    on disk. `resume`: a folder that keeps each finished block; a run that was killed continues after them.

    >>> reconstruct(qmodel, batches, method="brecq")  # doctest: +SKIP
    {'layer1.0': BlockReconstruction(before=0.0398, after=0.0215, num_changed=412), ...}
    """
    chosen = rounding, learn_step_sizes, learn_weight_scales, learn_biases, drop, fisher
    settings = METHODS[method].changed(*chosen)
    training = BlockTraining(steps, batch_size, seed, float_share, patience, bf16)
    rates = Rates(_TRAVEL[settings.rounding] / steps if lr is None else lr, scale_lr, scale_lr, bias_lr)
    options = _Options(settings, training, rates, penalty, HoldOut(held_out, seed))
    return _reconstructed(qmodel, data, options, method, blocks, views, memory_budget, resume)


def _reconstructed(
    qmodel: QuantModel,
    data: Any,
    options: _Options,
    method: Method,
    blocks: Any,
    views: int,
    memory_budget: int,
    resume: str | os.PathLike[str] | None,
) -> dict[str, BlockReconstruction]:
    unit = options.settings.unit if blocks is None else blocks
    if not unit:
        raise ConfigError("reconstruct(blocks=[]): name at least one module, or leave it out")
    sensitivity = None
    if options.settings.fisher and unit != "network":
        sensitivity = OutputSensitivity(memory_budget, options.training.seed)
    run = _Run(qmodel, options, sensitivity)
    qmodel.visit_blocks(
        data,
        run.visit,
        blocks=None if unit == "blocks" else unit,
        memory_budget=memory_budget,
        resume=folder_of(resume, "reconstruction", {**asdict(options), "blocks": unit, "views": views}),
        prepare=None if sensitivity is None else sensitivity.prepare,
        hold_out=options.hold_out,
        views=views,
    )
    run.reasons |= dict.fromkeys(weights_outside(qmodel.model), "untraced code calls its layer")
    run.log_summary(method, has_named_blocks=not isinstance(unit, str))
    return run.found


class _Run:
    """The results of one run: each block's errors, blocks with nothing to learn, and why weights stay."""

    def __init__(self, qmodel: QuantModel, options: _Options, sensitivity: OutputSensitivity | None) -> None:
        self.options, self.sensitivity, self.float_parameters = options, sensitivity, qmodel.float_parameters
        self.owners = num_owners(qmodel.model)
        self.found: dict[str, BlockReconstruction] = {}
        self.reasons: dict[str, str] = {}
        self.empty: list[str] = []

    def visit(self, data: BlockData) -> None:
        block, options = data.block, self.options
        generator = torch.Generator().manual_seed(block_seed(options.training.seed, f"drop/{block.name}"))
        sites, reasons = find_sites(block, options.settings, self.owners, self.float_parameters, generator)
        self.reasons |= reasons
        if not sites.groups(options.rates):
            self.empty.append(block.name)
            return
        extras = None if self.sensitivity is None else self.sensitivity.of(block)
        self.found[block.name] = result = _reconstruct_block(data, sites, options, extras)
        if self.sensitivity is not None:
            self.sensitivity.drop(block)
        log.debug("%s: %s", block.name, result)

    def log_summary(self, method: Method, *, has_named_blocks: bool) -> None:
        found, put_back = self.found, [name for name, result in self.found.items() if not result.is_kept]
        log.info("%s: %d of %d blocks reconstructed", method, len(found) - len(put_back), len(found))
        if put_back:
            log.info("%s: these are unchanged, because their error did not fall: %s", method, ", ".join(put_back))
        if len(put_back) * 2 > len(found) > 1:
            log.warning(
                "%s: %d of %d blocks are unchanged, because the training did not lower their error on other samples; "
                "give more calibration samples",
                *(method, len(put_back), len(found)),
            )
        if self.empty and has_named_blocks:
            names = ", ".join(self.empty)
            log.warning("reconstruct(): nothing can be learned in %s: no quantized weight or step size", names)
        if self.reasons:
            shown = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
            log.warning("reconstruct() left %d weights unchanged: %s", len(self.reasons), shown)


def _reconstruct_block(
    data: BlockData, sites: LearnedSites, options: _Options, weights: BatchValues | None
) -> BlockReconstruction:
    """Train one block, and keep the result if its error fell. `weights`: of the error of each output element."""
    state = {name: tensor.clone() for name, tensor in block_state(data.block).items()}
    extras = None if weights is None else weights.part(data.batches)

    def error(part: BlockData) -> float:
        return mean_distance(part, squared_error, None if weights is None else weights.part(part.batches))

    def errors() -> tuple[float, float | None]:
        return error(data), None if data.held_out is None else error(data.held_out)

    before, held_before = errors()

    def distance(outputs: Values, targets: Values, extras: Values) -> Tensor:
        # Relative to the initial error, so that one penalty weight fits every block.
        return squared_error(outputs, targets, extras) / max(before, 1e-12)

    def penalty(progress: float) -> Tensor | None:
        found = [p for site in sites.weights if (p := site.learned.penalty(progress)) is not None]
        return options.penalty * torch.stack(found).mean() if found else None

    groups = sites.groups(options.rates)
    with in_place(sites, list(data.block.modules.values())):
        try:
            train_block(data, groups, options.training, distance=distance, extras=extras, penalty=penalty)
        except BaseException:
            load_block_state(data.block, state)  # biases are trained in place
            raise
    num_changed = sites.store()
    after, held_after = errors()
    if held_before is not None and held_after is not None:
        is_kept = held_after < held_before
    else:
        is_kept = after < before * (_MARGIN if sites.were_fitted else 1.0)
    if not is_kept:
        load_block_state(data.block, state)
        after, num_changed = before, 0
    return BlockReconstruction(before, after, num_changed, held_before, held_after, is_kept)
