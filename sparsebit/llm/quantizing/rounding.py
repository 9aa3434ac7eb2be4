"""Rounds one linear layer's weight by the method of a recipe to packed codes.

The formulas are in `numerics/rounding`; here a recipe becomes their arguments, and their codes a `PackedWeight`. Layers
that read one input are rounded together as rows of one matrix. Scales are rounded to the type of the files before codes
are chosen, so that the codes fit the stored scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.layers.float_kinds import GROUPS
from sparsebit.llm.layers.float_weight import FloatWeight, Weight, round_to_floats
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.llm.recipe import Recipe
from sparsebit.numerics.float4 import Float4Spec
from sparsebit.numerics.qparams import SMALLEST_SCALE, qparams_from_range
from sparsebit.numerics.rounding.gptq_math import InverseFactor, Rounded, quantize, round_nearest
from sparsebit.numerics.rounding.hessian import InputMoments
from sparsebit.numerics.rounding.scale_search_math import Rounding
from sparsebit.numerics.spec import PerChannel, PerGroup, TensorSpec
from sparsebit.numerics.weight_grid import Grid

# By bits: the smallest tried scale, as a share of the full range's. With fewer codes it pays to clip more.
_SMALLEST_FACTOR = {2: 0.3, 3: 0.4}


@dataclass(frozen=True)
class RoundedLayer:
    """The packed weight, and the squared error of the layer's output relative to the output's size.

    `nearest_error`: that of rounding to nearest with scales that cover the whole range.
    """

    packed: Weight
    error: float
    nearest_error: float


def round_weight(
    weight: Tensor, moments: InputMoments | None, recipe: Recipe, name: str, *, stored: torch.dtype
) -> RoundedLayer:
    """`weight (out, in)` on the recipe's grid; `moments`: of the input, if needed; `stored`: the type of scales."""
    return round_weights({name: weight}, moments, recipe, stored=stored)[name]


@torch.no_grad()
def round_weights(
    weights: Mapping[str, Tensor],
    moments: InputMoments | None,
    recipe: Recipe,
    *,
    stored: torch.dtype,
    take_moments: bool = False,
) -> dict[str, RoundedLayer]:
    """Layers that read one input, by name, rounded together as rows; `take_moments`: these are overwritten."""
    floats = {} if recipe.float_kind is None else _as_floats(weights, recipe, stored)
    if floats and not recipe.compensate:
        return floats
    W = torch.cat([weight.detach().float() for weight in weights.values()])[None]
    size = {recipe.columns_per_scale(W.shape[-1], name) for name in weights}.pop()
    grid = _grid(W, recipe, size, stored) if not floats else _float_grid(W, recipe, [*floats.values()], size)
    rounding = _rounding(recipe)
    H, cross = _second_moments(moments, W, take=take_moments)
    energy = ((W @ H.to(W)) * W).sum(-1)[0]  # the mean square of each output
    if recipe.uses_gptq:
        # The weight for the float model's inputs; see `gptq_target_math.target_weight`.
        correction = None if cross is None else W.to(H) @ cross.sub_(H)
        del cross
        factor = InverseFactor(H, rounding)
        if correction is not None:
            W = (W + recipe.input_correction * factor.solved(correction)).to(W)
            del correction
        factor.only_rounds(W.dtype)
        H = H.to(W)  # only the factor needs float64, which takes 1.6 GB for 14336 columns
        rounded = quantize(W, H, grid, rounding, factor)
    else:
        rounded = round_nearest(W, H, grid, rounding)
    return _apart(rounded, weights, energy, recipe, size, stored, floats)


def layer_format(weight: Weight, recipe: Recipe) -> LayerFormat:
    """The number format of a layer that was rounded by the recipe."""
    if isinstance(weight, FloatWeight):
        return LayerFormat(weight.bits, GROUPS[weight.kind], True, weight.kind, recipe.inputs)
    size, inputs = weight.group_size if recipe.group_size else 0, recipe.inputs
    # vLLM reads int8 products from codes in bytes.
    is_dense = inputs is not None and inputs.kind == "int8"
    return LayerFormat(weight.bits, size, weight.symmetric, inputs=inputs, is_dense=is_dense)


def _second_moments(moments: InputMoments | None, weight: Tensor, *, take: bool) -> tuple[Tensor, Tensor | None]:
    """`(H, cross)`; without moments the identity, which makes the loss the error of the weights."""
    if moments is None:
        return torch.eye(weight.shape[-1], device=weight.device)[None], None
    if take:
        return moments.take()
    return moments.hessian(), moments.cross() if moments.has_originals else None


def _apart(
    rounded: Rounded,
    weights: Mapping[str, Tensor],
    energy: Tensor,
    recipe: Recipe,
    size: int,
    stored: torch.dtype,
    floats: Mapping[str, RoundedLayer],
) -> dict[str, RoundedLayer]:
    """Split the jointly rounded layers again. `floats`: those of float numbers, to nearest."""
    num_rows = [len(weight) for weight in weights.values()]
    packed: Sequence[Weight] = () if floats else _packed(rounded, recipe, size, stored, num_rows)
    if floats:
        numbers = rounded.codes[0].split(num_rows)
        plain = [one.packed for one in floats.values()]
        packed = [
            one.with_numbers(own) for one, own in zip(plain, numbers, strict=True) if isinstance(one, FloatWeight)
        ]
    parts = zip(*(part.split(num_rows) for part in (energy, rounded.loss[0], rounded.nearest_loss[0])), strict=True)
    return {
        name: RoundedLayer(own, *(float(loss.sum()) / max(float(power.sum()), 1e-30) for loss in losses))
        for name, own, (power, *losses) in zip(weights, packed, parts, strict=True)
    }


def _as_floats(weights: Mapping[str, Tensor], recipe: Recipe, stored: torch.dtype) -> dict[str, RoundedLayer]:
    """Round to floats of 8 or 4 bits.

    vLLM joins these layers, and has one divisor of nvfp4 for them: with several it would compute wrong weights.
    """
    most = max(float(weight.detach().abs().max()) for weight in weights.values())
    return {name: _one_as_floats(weight, recipe, stored, most) for name, weight in weights.items()}


def _float_grid(weight: Tensor, recipe: Recipe, layers: Sequence[RoundedLayer], size: int) -> Grid:
    """The numbers of these layers' format with their scales, for `weight (1, out, in)` of all."""
    scales = [layer.packed.scale_numbers() for layer in layers if isinstance(layer.packed, FloatWeight)]
    scale, group = torch.cat(scales).to(weight), PerGroup(1, size)
    index = torch.arange(scale.numel(), device=weight.device).view_as(scale).repeat_interleave(size, 1)[None]
    is_wide = recipe.float_kind == "fp8"
    spec = TensorSpec(8, True, PerChannel(0), format="float8") if is_wide else Float4Spec(4, True, group)
    flat = scale.flatten()
    return Grid(flat, torch.zeros_like(flat), index, spec)


def _one_as_floats(weight: Tensor, recipe: Recipe, stored: torch.dtype, most: float) -> RoundedLayer:
    kind = recipe.float_kind
    assert kind is not None
    W, searches = weight.detach().float(), recipe.scale_search != "none"
    floats, plain = (
        round_to_floats(weight, kind, search=search, stored=stored, most=most) for search in (searches, False)
    )
    errors = [(one.dequantize(torch.float32).to(W) - W).square().sum() / W.square().sum() for one in (floats, plain)]
    return RoundedLayer(floats, *map(float, errors))


def nearest_values(recipe: Recipe, name: str, stored: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function that rounds a weight `(out, in)` to nearest, on a grid that covers its whole range."""
    kind = recipe.float_kind

    def round_(weight: Tensor) -> Tensor:
        if kind is not None:
            floats = round_to_floats(weight, kind, search=False, stored=stored)
            return floats.dequantize(torch.float32).to(weight)
        W = weight[None]
        grid = _grid(W, recipe, recipe.columns_per_scale(weight.shape[1], name), stored)
        return grid.values(grid.nearest(W))[0]

    return round_


@torch.no_grad()
def row_losses(weight: Tensor, moments: InputMoments, recipe: Recipe, name: str, *, stored: torch.dtype) -> Tensor:
    """The mean squared error of rounding in each output of the layer, `(out,)`, without corrected inputs."""
    size = recipe.columns_per_scale(weight.shape[1], name)
    W = weight.detach().float()[None]
    H, grid = moments.hessian(), _grid(W, recipe, size, stored)
    round_ = quantize if recipe.uses_gptq else round_nearest
    return round_(W, H, grid, _rounding(recipe)).loss[0].double().cpu()


def _grid(weight: Tensor, recipe: Recipe, size: int, stored: torch.dtype) -> Grid:
    """The grid that covers the range of each group of `weight (1, out, in)`."""
    spec = TensorSpec(recipe.bits, recipe.symmetric, PerGroup(1, size))
    groups = weight[0].unflatten(1, (-1, size))
    scale, zero_point = qparams_from_range(groups.amin(-1), groups.amax(-1), spec)
    index = torch.arange(scale.numel(), device=weight.device).view_as(scale).repeat_interleave(size, 1)[None]
    smallest = torch.tensor(smallest_scale(stored), device=weight.device)
    grid = Grid(scale.flatten(), zero_point.flatten(), index, spec, smallest, stored)
    return grid.with_scale(grid.scale)


def smallest_scale(stored: torch.dtype) -> float:
    """The smallest scale that does not become 0 in the type of the files; in float16 a subnormal number: its normal
    ones start at 6e-5, and a layer of smaller weights would be lost.
    """
    info = torch.finfo(stored)
    return max(SMALLEST_SCALE, info.tiny * info.eps)


def _rounding(recipe: Recipe) -> Rounding:
    is_float = recipe.float_kind is not None  # their scales are chosen before
    return Rounding(
        act_order=recipe.act_order,
        damping=recipe.damping,
        block_size=32,  # the fastest for layers of 512 to 1408 columns on a CPU; it does not change the method
        scale_search="none" if is_float else recipe.scale_search,
        smallest_factor=_SMALLEST_FACTOR.get(recipe.bits, 0.5),
        sweeps=recipe.sweeps,
        refit=recipe.refit and not is_float,
        zero_point_shift=1 if recipe.bits < 8 else 0,
    )


def _packed(
    rounded: Rounded, recipe: Recipe, size: int, stored: torch.dtype, num_rows: list[int]
) -> list[PackedWeight]:
    codes, grid = rounded.codes[0], rounded.grid
    shape = (codes.shape[0], codes.shape[1] // size)
    codes = (codes - grid.spec.qmin).to(torch.uint8)  # a symmetric grid counts from its lowest code
    zeros = None if recipe.symmetric else grid.zero_point.view(shape)
    scales = grid.scale.view(shape).to(stored).split(num_rows)
    every = [None] * len(num_rows) if zeros is None else zeros.split(num_rows)
    parts = zip(codes.split(num_rows), scales, every, strict=True)
    return [PackedWeight.from_codes(own, scale.clone(), zero, recipe.bits).to("cpu") for own, scale, zero in parts]
