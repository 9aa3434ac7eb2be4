"""`ChannelScaling`: the scales of AWQ, searched for each input of a block and folded if that is exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sparsebit.llm.models.architectures import Stages, linears
from sparsebit.llm.models.input_scaling import Fold, ScaledInput, find_fold, scale_readers, scale_source
from sparsebit.llm.models.separate_experts import experts_in
from sparsebit.llm.quantizing.block_walk import BlockWalk
from sparsebit.llm.quantizing.rounding import nearest_values
from sparsebit.llm.recipe import Recipe
from sparsebit.numerics.rounding.awq_math import search_channel_scale
from sparsebit.numerics.rounding.hessian import InputMoments


class ChannelScaling:
    """Scales of the inputs of blocks. For blocks of one structure, the place to fold them is searched once."""

    def __init__(
        self, walk: BlockWalk, recipe_of: Callable[[str], Recipe], stored: Callable[[str], torch.dtype]
    ) -> None:
        self.walk, self.recipe_of, self.stored = walk, recipe_of, stored
        self._folds: dict[object, Fold | None] = {}

    @torch.no_grad()
    def apply(self, block: nn.Module, stages: Stages, path: str) -> dict[str, ScaledInput]:
        """Scale the block at `path` of the model, before rounding; returns the result, by each stage's layers."""
        inside = tuple(f"{name}." for name in experts_in(block))
        alone = tuple(stage for stage in stages if not stage[0].startswith(inside))
        found = {
            ", ".join(stage): ScaledInput(reason="layers of experts share their input with what chooses the experts")
            for stage in stages
            if stage not in alone
        }
        folds = {stage: self._fold(block, stage, stages) for stage in alone}
        for part in self.walk.chunks(block, alone):
            gathered = self.walk.moments_together(block, part)
            for stage in part:
                found[", ".join(stage)] = self._scale(block, stage, folds[stage], gathered[stage[0]], path)
        return found

    def _fold(self, block: nn.Module, stage: tuple[str, ...], stages: Stages) -> Fold | None:
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
        key = (type(block), stage, stages, shapes)
        if key not in self._folds:
            self._folds[key] = find_fold(block, stage, self.walk.run_first)
        return self._folds[key]

    def _scale(
        self, block: nn.Module, stage: Sequence[str], fold: Fold | None, moments: InputMoments, path: str
    ) -> ScaledInput:
        if fold is None:
            return ScaledInput(reason="no preceding norm or layer can take the scale exactly")
        modules = linears(block)
        weights = [modules[name].weight.detach().float() for name in stage]
        nearest = [
            nearest_values(self.recipe_of(f"{path}.{name}"), f"{path}.{name}", self.stored(f"{path}.{name}.weight"))
            for name in stage
        ]
        H = moments.hessian()[0].to(weights[0])
        owner = fold.owner.to(H.device)
        found = search_channel_scale(weights, H, owner, nearest)
        if found.alpha == 0:
            return ScaledInput(0.0, fold.source)
        factor = self._storable(block, fold, 1 / found.scale, path)
        if factor is None:
            return ScaledInput(reason=f"{fold.source} would not hold the scale in the type of the files")
        scale_source(block, fold, factor)
        scale_readers(block, stage, 1 / factor[owner])
        return ScaledInput(found.alpha, fold.source)

    def _storable(self, block: nn.Module, fold: Fold, factor: Tensor, path: str) -> Tensor | None:
        """Factors for which the norm's weights are exact in the files' type, so that rounding them changes nothing.

        A linear layer is rounded afterwards anyway; its bias is rounded to its type.
        """
        weight = block.get_submodule(fold.source).weight
        assert isinstance(weight, Tensor)
        if weight.ndim != 1:
            return factor
        stored = self.stored(f"{path}.{fold.source}.weight")
        whole = weight.double() + fold.offset
        wanted = (whole * factor.double() - fold.offset).to(stored)
        found = torch.where(whole != 0, (wanted.double() + fold.offset) / whole, factor.double())
        is_good = bool(torch.isfinite(found).all()) and bool(((found / factor.double() - 1).abs() < 0.1).all())
        return found.to(factor) if is_good else None
