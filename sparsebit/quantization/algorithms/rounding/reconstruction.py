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
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.execution.blocks.distances import Loss
from sparsebit.execution.blocks.engine import BatchValues, BlockData
from sparsebit.execution.blocks.training import BlockTraining, block_seed, train_block
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
from sparsebit.quantization.algorithms.rounding.matching import Comparison, Matching, has_float
from sparsebit.quantization.algorithms.rounding.output_sensitivity import OutputSensitivity
from sparsebit.quantization.algorithms.rounding.teacher import Teacher
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
# Views of each held-out image, where images to learn from are viewed anew in every step.
_HELD_VIEWS = 4
# The whole network's training ends at half of the steps if its error on held-out samples is still so many times the
# initial one.
_HALF, _HOPELESS = 0.5, 2.0
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
    matching: Matching


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
    fisher_rank: Annotated[int, Field(ge=0)] = 0,
    float_share: Annotated[float, Field(ge=0, le=1)] = 0.0,
    penalty: Annotated[float, Field(ge=0)] = 100.0,
    patience: Annotated[int, Field(ge=0)] = 0,
    bf16: bool = False,
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.125,
    views: Annotated[int, Field(ge=0)] = 1,
    patched: Annotated[float, Field(ge=0, le=1)] = 0.0,
    loss: Loss = "squared",
    temperature: Annotated[float, Field(gt=0)] = 1.0,
    features: Annotated[float, Field(ge=0)] = 0.0,
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
    output. `fisher_rank`: so many directions of that effect, besides a weight for each element. `float_share`: share of
    the inputs' elements that come from the float model. `penalty`: weight of the sigmoid rounding's regularizer.
    `patience`: stop a block when its loss has not fallen for so many tenths of the steps; 0: never. `bf16`: compute in
    bfloat16 on a GPU. `held_out`: share of the samples (at least 8 or a quarter, at most 64) that are not trained on
    and decide which blocks are restored; with 0, or of fewer than 4, the others do.
    `views`: learn from so many views of each image (N, C, H, W): itself, and mirrored copies, shifted by up to an
    eighth; 0, for the network: from new views in every step. `patched`: share of these with a rectangle of another
    image. `loss`: of the network's outputs: "squared" error or "kl", the divergence of their softmaxes.
    `temperature`: of these softmaxes. `features`: weight of the errors at the outputs of the network's blocks. `seed`:
    two runs with one seed have equal bits. `memory_budget`: bytes of activations in memory; others are on disk.
    `resume`: a folder that keeps each finished block; a run that was killed continues after them.

    >>> reconstruct(qmodel, batches, method="brecq")  # doctest: +SKIP
    {'layer1.0': BlockReconstruction(before=0.0398, after=0.0215, num_changed=412), ...}
    """
    chosen = rounding, learn_step_sizes, learn_weight_scales, learn_biases, drop, fisher
    settings = METHODS[method].changed(*chosen)
    training = BlockTraining(steps, batch_size, seed, float_share, patience, bf16)
    rates = Rates(_TRAVEL[settings.rounding] / steps if lr is None else lr, scale_lr, scale_lr, bias_lr)
    matching = Matching(fisher_rank, views == 0, patched, loss, temperature, features)
    _check_matching(matching, settings, settings.unit if blocks is None else blocks)
    options = _Options(settings, training, rates, penalty, HoldOut(held_out, seed), matching)
    return _reconstructed(qmodel, data, options, method, blocks, views, memory_budget, resume)


def _check_matching(matching: Matching, settings: Settings, unit: Any) -> None:
    """Raise for options that would have no effect."""
    alone = replace(matching, rank=0, temperature=1.0)
    if unit != "network" and alone != Matching():
        raise ConfigError(
            "reconstruct(): views=0, patched, loss and features are for the whole network, and the blocks are "
            f'{unit!r}; set blocks="network" or method="distill", or leave them out'
        )
    if matching.patched and not matching.is_renewed:
        raise ConfigError(f"reconstruct(patched={matching.patched}): only new views are patched; set views=0, too")
    if matching.rank and (not settings.fisher or unit == "network"):
        raise ConfigError(f"reconstruct(fisher_rank={matching.rank}): it needs fisher=True, and blocks of the network")


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
        sensitivity = OutputSensitivity(memory_budget, options.training.seed, options.matching.rank)
    run = _Run(qmodel, options, sensitivity)
    qmodel.visit_blocks(
        data,
        run.visit,
        blocks=None if unit == "blocks" else unit,
        memory_budget=memory_budget,
        resume=folder_of(resume, "reconstruction", {**asdict(options), "blocks": unit, "views": views}),
        prepare=None if sensitivity is None else sensitivity.prepare,
        hold_out=options.hold_out,
        views=max(views, 1),
        held_views=views or _HELD_VIEWS,
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
        if not has_float(data.targets[0]):
            self.reasons[block.name] = "it has no float output to compare"
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
            log.warning("reconstruct() left %d weights or blocks unchanged: %s", len(self.reasons), shown)


def _reconstruct_block(
    data: BlockData, sites: LearnedSites, options: _Options, weights: BatchValues | None
) -> BlockReconstruction:
    """Train one block, and keep the result if its error fell. `weights`: of the error of each output element."""
    state = {name: tensor.clone() for name, tensor in block_state(data.block).items()}
    comparison = Comparison(data, options.matching, weights)
    before, held_before = comparison.before, None if data.held_out is None else comparison.error(data.held_out)
    with in_place(sites, list(data.block.modules.values())):
        try:
            _learn(data, sites, options, comparison, held_before)
        except BaseException as error:
            load_block_state(data.block, state)  # biases are trained in place
            if not isinstance(error, CalibrationError) or not options.matching.is_renewed:
                raise
            # New views may be what the float model was not made for, while it answers the samples themselves.
            log.warning("%s is unchanged: %s", data.block.name, error)
            return BlockReconstruction(before, before, 0, held_before, held_before, is_kept=False)
    num_changed = sites.store()
    after, held_after = comparison.error(data), None if data.held_out is None else comparison.error(data.held_out)
    if held_before is not None and held_after is not None:
        is_kept = held_after < held_before
    else:
        is_kept = after < before * (_MARGIN if sites.were_fitted else 1.0)
    if not is_kept:
        load_block_state(data.block, state)
        after, num_changed = before, 0
    return BlockReconstruction(before, after, num_changed, held_before, held_after, is_kept)


def _learn(
    data: BlockData, sites: LearnedSites, options: _Options, comparison: Comparison, held_before: float | None
) -> None:
    teacher, weights = None, comparison.weights
    if options.matching.is_renewed or comparison.nodes:
        teacher = Teacher(data, comparison.nodes, options.matching)

    def penalty(progress: float) -> Tensor | None:
        found = [p for site in sites.weights if (p := site.learned.penalty(progress)) is not None]
        return options.penalty * torch.stack(found).mean() if found else None

    def is_hopeless(progress: float) -> bool:
        if data.held_out is None or held_before is None or not options.matching.is_renewed:
            return False
        held = comparison.error(data.held_out)
        log.debug("%s: held-out %.4g (%.4g) at %.1f", data.block.name, held, held_before, progress)
        return progress >= _HALF and held > _HOPELESS * held_before

    train_block(
        data,
        sites.groups(options.rates),
        options.training,
        distance=comparison.distance,
        extras=None if weights is None else weights.part(data.batches),
        penalty=penalty if options.settings.rounding == "sigmoid" else None,
        teacher=teacher,
        is_hopeless=is_hopeless,
    )
