"""GPTQ on a calibrated model: rounds each layer's weight so that its output stays near that of the float model.

The arithmetic is in `sparsebit.numerics.rounding.gptq_math`. This file visits the layers in order, each with the input
from the quantized layers before it; afterwards the weight holds the dequantized values of its codes, and the quantizer
the matching scales.

For one layer (`_round_layer`): gather second moments of its quantized and float inputs, in two halves of the data;
choose damping and input correction by fitting on one half and judging on the other; round with all data; write codes,
scales and bias. It always rounds the float model's weight, so running it twice does not round twice.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, fx

from sparsebit.errors import CalibrationError
from sparsebit.execution.blocks.engine import BlockData
from sparsebit.execution.blocks.value_store import MIB
from sparsebit.execution.distributed import gather, is_distributed
from sparsebit.numerics.qparams import SMALLEST_SCALE, broadcast_to
from sparsebit.numerics.rounding.gptq_math import quantize, with_variance
from sparsebit.numerics.rounding.gptq_target_math import chosen_damping, chosen_rounding, target_weight
from sparsebit.numerics.rounding.hessian import InputMoments
from sparsebit.numerics.rounding.layer_matrix import LayerMatrix, layer_matrix
from sparsebit.numerics.rounding.outlier_samples import level_weight, sample_levels, usual_level
from sparsebit.numerics.rounding.scale_search_math import Rounding, ScaleSearch
from sparsebit.numerics.spec import PerGroup
from sparsebit.numerics.weight_grid import Grid
from sparsebit.quantization.algorithms.layer_visits import (
    folder_of,
    has_one_input,
    input_of,
    is_first_call,
    num_owners,
    smallest_scale,
    store_codes,
    weights_outside,
    why_weight_stays,
)
from sparsebit.quantization.algorithms.registration import register_algorithm
from sparsebit.quantization.building.float_parameters import FloatParameters
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr

log = logging.getLogger(__name__)

# With fewer rows of data for each column, a layer's second moments fit this data alone, which is worth a warning.
_FEWEST_ROWS = 4
_DAMPING = 0.01
# With fewer rows per column than this, the damping is chosen by held-out data. Measured: ResNet-20, with 28 rows per
# column, gained nothing by the choice, and calibration with GPTQ took 1.5 times as long.
_PLENTY_OF_ROWS = 16
# The number of factors that are tried for each scale. With "gptq" each one costs a whole rounding, and the refit that
# follows is finer than either step.
_NUM_CANDIDATES: dict[ScaleSearch, int] = {"none": 1, "nearest": 24, "gptq": 12}


@dataclass(frozen=True)
class LayerRounding:
    """The squared error of one layer's output (mean over its input rows, summed over channels), by rounding method.

    `nearest`: each weight to the nearest value of the calibrated grid. `rounded`: after GPTQ.
    """

    nearest: float
    rounded: float


@dataclass(frozen=True)
class _Options:
    rounding: Rounding
    input_correction: float | Literal["auto"]
    correct_bias: bool
    keep_variance: bool
    max_rows: int | None
    choose_damping: bool


@register_algorithm("gptq")
def gptq(
    qmodel: QuantModel,
    data: Any,
    *,
    act_order: bool = True,
    damping: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto",
    scale_search: ScaleSearch = "nearest",
    refit: bool = True,
    sweeps: Annotated[int, Field(ge=0)] = 2,
    input_correction: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto",
    correct_bias: bool = True,
    keep_variance: bool = False,
    block_size: Annotated[int, Field(ge=1)] = 128,
    max_rows: Annotated[int, Field(ge=1)] | None = None,
    memory_budget: int = 1024 * MIB,
    resume: str | os.PathLike[str] | None = None,
) -> dict[str, LayerRounding]:
    """Round the weights of a calibrated model with GPTQ, in place, on `data` (batches as for calibration, no labels).

    Linear layers and convolutions of every kind are rounded, in graph order; returns the errors of each before and
    after. Other weights (embeddings, tied or computed ones) stay rounded to nearest, and are logged.

    `act_order`: columns with the largest inputs first. `damping`: of the Hessian, as a share of its mean diagonal;
    "auto": 0.01, or more in a layer with few rows of data for each of its columns, if that lowers the error on one half
    of the data when weights are rounded on the other half.
    `scale_search`: scales are multiplied by the best factor in [0.5, 1], judged by the error of round-to-nearest
    ("nearest"), by that of GPTQ itself ("gptq", slower), or not ("none"). `refit`: scales are fitted to the codes in
    closed form. `sweeps`: how often codes are improved one by one afterwards. `input_correction`: how much of the
    difference between the quantized and the float input the weight compensates for, from 0 (nothing) to 1; "auto": in
    each layer as much as one half of the data confirms for the other. `correct_bias`: the bias absorbs the mean error.
    `keep_variance`: scales are multiplied so that each channel of the output varies as much as in the float model.
    `block_size`: columns between two updates of the whole weight; it affects the time, not the method.
    `max_rows`: about this many rows of a layer's input (of a convolution: positions) are read, or 8 for each of its
    columns if that is more; None: all. `resume`: a folder that keeps each finished layer; a run that was killed
    continues after them.

    >>> gptq(qmodel, batches)  # doctest: +SKIP
    {'conv1': LayerRounding(nearest=0.0113, rounded=0.0021), ...}
    """
    share, num_candidates = _DAMPING if damping == "auto" else damping, _NUM_CANDIDATES[scale_search]
    rounding = Rounding(
        act_order, share, block_size, scale_search, num_candidates=num_candidates, sweeps=sweeps, refit=refit
    )
    options = _Options(rounding, input_correction, correct_bias, keep_variance, max_rows, damping == "auto")
    run, folder = _Run(qmodel, options), folder_of(resume, "gptq", asdict(options))
    qmodel.visit_blocks(data, run.visit, blocks="layers", memory_budget=memory_budget, resume=folder)
    run.reasons |= dict.fromkeys(weights_outside(qmodel.model), "untraced code calls its layer")
    run.log_summary()
    return run.found


class _Run:
    """The results of one run: each layer's errors, why other weights stay, and which layers had few rows of data."""

    def __init__(self, qmodel: QuantModel, options: _Options) -> None:
        self.options, self.float_parameters = options, qmodel.float_parameters
        self.owners = num_owners(qmodel.model)
        self.found: dict[str, LayerRounding] = {}
        self.reasons: dict[str, str] = {}
        self.scarce: dict[str, float] = {}

    @torch.no_grad()
    def visit(self, data: BlockData) -> None:
        (layer,), name = data.block.modules.values(), data.block.name
        if not isinstance(layer, WeightedQuantOpr) or not is_first_call(data.block.nodes[0]):
            return
        if not layer.weight_quantizer.is_enable:  # switched off by the config
            return
        form = _matrix_form(layer, data.block.nodes[0], self.owners)
        if isinstance(form, str):
            self.reasons[name] = form
            return
        bias = layer.op._parameters.get("bias")
        has_own_bias = bias is not None and self.owners[id(bias)] == 1
        options = replace(self.options, correct_bias=self.options.correct_bias and has_own_bias)
        gained, rows_per_column = _round_layer(layer, form, data, options, self.float_parameters)
        self.found[name] = gained
        if rows_per_column < _FEWEST_ROWS:
            self.scarce[name] = rows_per_column
        log.debug("%s: error %.4g to nearest, %.4g with GPTQ", name, gained.nearest, gained.rounded)

    def log_summary(self) -> None:
        log.info("GPTQ: %d layers rounded", len(self.found))
        if self.reasons:
            shown = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
            log.warning("GPTQ left %d weights rounded to nearest: %s", len(self.reasons), shown)
        if scarce := self.scarce:
            log.warning(
                "GPTQ: %d layers have fewer than %d rows of data for each of their inputs (%s has %.2g), and may fit "
                "this data alone; give more, or leave 8-bit weights rounded to nearest",
                *(len(scarce), _FEWEST_ROWS, min(scarce, key=scarce.__getitem__), min(scarce.values())),
            )


def _matrix_form(layer: WeightedQuantOpr, node: fx.Node, owners: dict[int, int]) -> LayerMatrix | str:
    """The layer as a matrix product, or the reason why its weight is not changed."""
    form = layer_matrix(layer.op)
    if reason := why_weight_stays(layer, owners):
        return reason
    if form is None:
        return f"{type(layer.op).__name__} is not a plain linear layer or convolution"
    if not has_one_input(node):
        return "it is called with more than its input"
    weight, granularity = layer.op.get_parameter("weight"), layer.weight_quantizer.spec.granularity
    return form.in_parts(weight, granularity.size * weight[0, 0].numel() if isinstance(granularity, PerGroup) else 1)


def _round_layer(
    layer: WeightedQuantOpr, form: LayerMatrix, data: BlockData, options: _Options, float_parameters: FloatParameters
) -> tuple[LayerRounding, float]:
    """Round one layer. Returns its errors, and how many rows of data there were for each column of its weight."""
    op, quantizer = layer.op, layer.weight_quantizer
    weight, bias = op.get_parameter("weight"), op._parameters.get("bias")
    # If an algorithm ran before, its result is discarded: the float model's weight is rounded.
    path = data.block.nodes[0].target
    weight_before, bias_before = (float_parameters.get(f"{path}.op.{name}") for name in ("weight", "bias"))
    float_weight = form.matrix(weight.detach() if weight_before is None else weight_before.to(weight))
    halves, power = _moments(layer, form, data, float_weight if options.keep_variance else None, options)
    moments = InputMoments(halves[0].dtype)
    for half in halves:
        moments.merge(half)
    if not moments.is_finite:
        raise CalibrationError(f"{data.block.name}: its input is not finite; a batch has NaN or infinity")
    has_bias = options.correct_bias and bias is not None
    # A bias absorbs the mean error, so only deviations from the mean count: the moments are centered.
    hessian, cross = _second_moments(moments, centered=has_bias)
    original = float_weight.to(hessian)
    sides = [_second_moments(half, centered=has_bias) for half in halves if half.num_rows]
    correction: tuple[float, float] | None = None  # damping and share
    if options.input_correction == "auto":
        damping = chosen_damping(original, sides) if len(sides) > 1 else None
        correction = None if damping is None else (damping, 1.0)
    elif options.input_correction:
        correction = options.rounding.damping, options.input_correction

    def target(hessian: Tensor, cross: Tensor) -> Tensor:
        return original if correction is None else target_weight(original, hessian, cross, *correction)

    rounding, grid = options.rounding, _grid(layer, form)
    rows_per_column = moments.num_rows / hessian.shape[-1]
    if options.choose_damping and len(sides) > 1 and rows_per_column < _PLENTY_OF_ROWS:
        rounding = chosen_rounding(original, sides, target, grid, rounding)
    wanted = target(hessian, cross)
    rounded = quantize(wanted, hessian, grid, rounding)
    if options.keep_variance:
        rounded = with_variance(rounded, wanted, hessian, power.variance(centered=has_bias))
    # Before the codes are stored: for a float64 layer `original` shares memory with the weight.
    if has_bias:
        assert bias is not None
        shift = _product(original, moments.original_mean) - _product(rounded.values, moments.mean)  # (groups, rows)
        bias.copy_((bias if bias_before is None else bias_before.to(bias)) + form.outputs(shift).to(bias))
    codes = form.weight(rounded.codes, weight.shape)
    store_codes(quantizer, weight, codes, rounded.grid.scale, rounded.grid.zero_point)
    gained = LayerRounding(float(rounded.nearest_loss.sum()), float(rounded.loss.sum()))
    return gained, rows_per_column


class _OutputPower:
    """Sums of a layer's float outputs and of their squares, `(2, groups, rows of the weight)`, in float64."""

    def __init__(self) -> None:
        self.total, self.sums = 0.0, torch.zeros((), dtype=torch.float64)

    def add(self, outputs: Tensor, weight: float) -> None:
        """`(groups, rows of data, rows of the weight)`; `weight`: how much each row of data counts."""
        sums = torch.stack([outputs.sum(1, dtype=torch.float64), outputs.square().sum(1, dtype=torch.float64)])
        self.merge(weight * sums, weight * outputs.shape[1])

    def merge(self, sums: Tensor, total: float) -> None:
        self.sums, self.total = self.sums.to(sums.device) + sums, self.total + total

    def variance(self, *, centered: bool) -> Tensor:
        mean, square = (self.sums / (self.total or 1)).unbind()
        return (square - mean.square()).clamp_min(0) if centered else square


def _moments(
    layer: WeightedQuantOpr, form: LayerMatrix, data: BlockData, float_weight: Tensor | None, options: _Options
) -> tuple[tuple[InputMoments, InputMoments], _OutputPower]:
    """The moments of the layer's quantized and float inputs, over all processes, for each half of the batches.

    A single batch is split into halves of its rows. With `float_weight`, also the power of the float output for the
    same rows. Samples that are far larger than nearly all others get a small weight.
    """
    weight = layer.op.get_parameter("weight")
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    halves, power = (InputMoments(dtype), InputMoments(dtype)), _OutputPower()
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
    with_originals = options.input_correction != 0 or options.correct_bias or options.keep_variance
    step, usual = 1, _usual_level(form, data)
    for index in range(data.num_batches):
        (x,) = layer.quantize_input((input_of(data, data.inputs, index),), {})
        if index == 0 and options.max_rows is not None:
            wanted = max(options.max_rows, 2 * _FEWEST_ROWS * form.matrix(weight).shape[-1])
            step = max(1, form.num_rows(x) * data.num_batches // wanted)
        original = input_of(data, data.float_inputs, index) if with_originals else x
        for place, (part, other) in enumerate(_parts(form, x, original, whole=data.num_batches * num_ranks > 1)):
            # Each rank has every n-th batch, as samplers distribute them: the halves equal those of one process.
            half = halves[(index * num_ranks + rank + place) % 2]
            for own, float_own, importance in _by_weight(part, other, usual):
                originals = form.patches(float_own, step) if with_originals else itertools.repeat(None)
                for patches, others in zip(form.patches(own, step), originals, strict=False):
                    half.add(patches, others, importance)
                    if others is not None and float_weight is not None:
                        power.add(others.to(dtype) @ float_weight.mT.to(dtype), importance)
    merged, total_power = (InputMoments(dtype), InputMoments(dtype)), _OutputPower()
    for states, sums, amount in gather(([half.state() for half in halves], power.sums.cpu(), power.total)):
        for total, state in zip(merged, states, strict=True):
            total.merge(InputMoments.from_state(state, weight.device))
        total_power.merge(sums.to(weight.device), amount)
    return merged, total_power


def _usual_level(form: LayerMatrix, data: BlockData) -> int | None:
    """The usual magnitude level of the input images, on all processes; None if no image is far above it.

    `numerics/rounding/outlier_samples.py` defines levels and the weights of samples above the usual one.
    """
    counts: Counter[int] = Counter()
    for index in range(data.num_batches if form.num_dims >= 2 else 0):
        x = input_of(data, data.float_inputs, index)
        if x.ndim == form.num_dims + 2:  # else it is a single sample
            counts.update(sample_levels(x).tolist())
    counts = sum(gather(counts), Counter())
    usual = usual_level(counts) if counts else None
    return None if usual is None or level_weight(max(counts), usual) == 1 else usual


def _by_weight(x: Tensor, original: Tensor, usual: int | None) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Groups of samples with the same weight, quantized and float, and that weight."""
    if usual is None:
        yield x, original, 1.0
        return
    weights = torch.tensor([level_weight(level, usual) for level in sample_levels(original).tolist()], device=x.device)
    for weight in weights.unique().tolist():
        yield x[weights == weight], original[weights == weight], weight


def _second_moments(moments: InputMoments, *, centered: bool) -> tuple[Tensor, Tensor]:
    """`H` and `cross`; without float inputs both are `H`."""
    hessian = moments.hessian(centered=centered)
    return hessian, moments.cross(centered=centered) if moments.has_originals else hessian


def _parts(form: LayerMatrix, x: Tensor, original: Tensor, *, whole: bool) -> list[tuple[Tensor, Tensor]]:
    """The batch and its float version, or both in two halves if it is the only batch and has several samples."""
    is_single = len(x) < 2 or x.ndim < 2 or x.ndim == form.num_dims + 1
    if whole or is_single:
        return [(x, original)]
    return list(zip(x.tensor_split(2), original.tensor_split(2), strict=True))


def _grid(layer: WeightedQuantOpr, form: LayerMatrix) -> Grid:
    """The calibrated grid of the layer's weight; every weight has the index of its scale."""
    weight, quantizer = layer.op.get_parameter("weight"), layer.weight_quantizer
    scale, zero_point = (param.detach().reshape(-1).double() for param in quantizer.qparams())
    numbers = torch.arange(scale.numel(), device=weight.device)
    index = broadcast_to(numbers, weight.shape, quantizer.spec.granularity).expand(weight.shape)
    least, smallest = smallest_scale(layer), torch.full_like(scale, SMALLEST_SCALE)
    smallest = smallest if least is None else torch.maximum(smallest, least.to(scale))
    scale = torch.maximum(scale.abs(), smallest)
    return Grid(scale, zero_point.round().expand_as(scale), form.matrix(index), quantizer.spec, smallest)


def _product(matrix: Tensor, mean: Tensor) -> Tensor:
    """`(groups, rows, columns)` times `(groups, columns)`."""
    return (matrix @ mean[..., None])[..., 0]
