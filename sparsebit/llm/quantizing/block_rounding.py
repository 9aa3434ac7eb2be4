"""`BlockRounding`: the weights of one block, rounded stage by stage, each on the outputs of those before.

Layers of a stage read the same input, so they share its second moments and are rounded together. A stage is rounded
after the earlier stages of its block have their rounded weights. Expert layers are different: each one reads its
own tokens, and one that too few tokens reach is rounded without them.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from sparsebit.llm.checkpoint.packed_folder import FinishedBlock, Measured
from sparsebit.llm.layers.float_weight import Weight, integers
from sparsebit.llm.layers.input_kinds import SCHEMES
from sparsebit.llm.layers.input_rounding import InputRounding
from sparsebit.llm.models.architectures import Stages, linears, passes_of
from sparsebit.llm.models.input_scaling import Fold, ScaledInput, find_fold, scale_readers, scale_source
from sparsebit.llm.models.separate_experts import experts_prefixes
from sparsebit.llm.quantizing.block_walk import BlockWalk
from sparsebit.llm.quantizing.learned_rounding import LearnedKind, learn_rounding
from sparsebit.llm.quantizing.rounding import nearest_values, round_weights
from sparsebit.llm.recipe import Recipe
from sparsebit.numerics.rounding.awq_math import search_channel_scale
from sparsebit.numerics.rounding.hessian import InputMoments
from sparsebit.numerics.rounding.smoothing_math import search_smoothing

log = logging.getLogger(__name__)
# An expert layer that reads fewer tokens than this for each of its columns is rounded without its Hessian: the method
# would fit the weight to the few tokens, with larger errors on others. Other layers only cause a warning. Measured on
# a layer of book-llama with 512 columns: GPTQ's error on other tokens is 1.8 times that of rounding to nearest with 1
# token a column, 1.08 with 2, 0.78 with 8.
TOKENS_PER_COLUMN = {"rtn": 0.25, "gptq": 3.0, "awq": 0.25, "autoround": 0.25, "efficientqat": 3.0}


class BlockRounding:
    """`recipe_of(layer)`: the recipe of a layer by its name in the model. `stored(name)`: a tensor's type in files."""

    def __init__(
        self, walk: BlockWalk, recipe: Recipe, recipe_of: Callable[[str], Recipe], stored: Callable[[str], torch.dtype]
    ) -> None:
        self.walk, self.recipe, self.recipe_of, self.stored = walk, recipe, recipe_of, stored
        self._scaling = ChannelScaling(walk, recipe_of, stored)

    def smooth(self, block: nn.Module, stages: Stages, path: str) -> dict[str, ScaledInput]:
        """Scale the inputs of the float block's layers, if the recipe wants it; its output is unchanged."""
        return self._scaling.apply(block, stages, path) if self.recipe.smooth else {}

    def round(
        self, original: nn.Module, changed: nn.Module, stages: Stages, path: str, stored: Mapping[str, Tensor]
    ) -> FinishedBlock:
        """Round the block at `path` of the model; `changed`, a copy of it, gets the rounded weights. `stored`: the
        parameters as in the files.
        """
        scales = self._scaling.apply(changed, stages, path) if self.recipe.method == "awq" else {}
        packed: dict[str, Weight] = {}
        measured: dict[str, Measured] = {}
        tokens: dict[str, int] = {}
        inside = experts_prefixes(changed)
        groups = passes_of(changed, stages)
        chunks = (self.walk.chunks(changed, group) if self.recipe.needs_moments else (group,) for group in groups)
        for part in itertools.chain.from_iterable(chunks):
            gathered = self._moments(original, changed, part, inside)
            for stage in part:
                moments = gathered.pop(stage[0], None)
                if moments is not None:
                    tokens |= {name: moments.num_rows for name in stage if name.startswith(inside)}
                rounded, known = self._round_stage(changed, stage, moments, tokens, path)
                packed, measured = packed | rounded, measured | known
                for name in stage:
                    put_weight(changed, name, packed[name])
        if self.recipe.learns:
            learned = self._learned(original, changed, packed, tokens, path)
            packed |= learned
            measured |= {name: Measured(measured[name].float_bytes) for name in learned}
        # The other parameters that the method has changed, such as norms.
        before = {name: one for name, one in stored.items() if name.removesuffix(".weight") not in packed}
        others = {
            name: value.detach().to(self.stored(f"{path}.{name}")).cpu()
            for name, value in changed.named_parameters()
            if name in before and not torch.equal(value, before[name])
        }
        return FinishedBlock(packed, tokens, others, scales, measured=measured)

    def _learned(
        self,
        original: nn.Module,
        changed: nn.Module,
        packed: Mapping[str, Weight],
        tokens: Mapping[str, int],
        path: str,
    ) -> dict[str, Weight]:
        """The layers with learned rounding; experts that got too few tokens are left out."""
        floats = {name: layer.weight for name, layer in linears(original).items()}
        chosen = {
            name: integers(weight)
            for name, weight in packed.items()
            if name not in tokens or fallback_of(tokens[name], weight.in_features, self.recipe) is None
        }
        kind: LearnedKind = "latent" if self.recipe.uses_gptq else "sign"
        found = learn_rounding(
            self.walk, changed, floats.__getitem__, chosen, kind=kind, steps=self.recipe.steps, name=path
        )
        return dict(found)

    def _moments(
        self, original: nn.Module, changed: nn.Module, part: Stages, inside: tuple[str, ...]
    ) -> dict[str, InputMoments]:
        """Second moments of the input of each stage, by its first layer; none, if no text is needed."""
        if not self.recipe.needs_moments:
            return {}
        if part[0][0].startswith(inside):
            return self.walk.moments_together(changed, part)
        return {stage[0]: self.walk.moments(original, changed, stage) for stage in part}

    def _round_stage(
        self, block: nn.Module, stage: Sequence[str], moments: InputMoments | None, tokens: Mapping[str, int], path: str
    ) -> tuple[dict[str, Weight], dict[str, Measured]]:
        """The layers of a stage; those that are rounded alike are rounded together. The moments are consumed."""
        modules, kinds = linears(block), dict[tuple[Recipe, torch.dtype, bool], list[str]]()
        for name in stage:
            full = f"{path}.{name}"
            recipe, is_known = self.recipe_of(full), moments is not None
            if name in tokens and fallback_of(tokens[name], modules[name].in_features, recipe) is not None:
                recipe, is_known = recipe.without_text(), False
            kinds.setdefault((recipe, self.stored(f"{full}.weight"), is_known), []).append(name)
        packed: dict[str, Weight] = {}
        measured: dict[str, Measured] = {}
        for (recipe, stored, is_known), names in kinds.items():
            found = round_weights(
                {f"{path}.{name}": modules[name].weight for name in names},
                moments if is_known else None,
                recipe,
                stored=stored,
                take_moments=len(kinds) == 1,
            )
            for name, (full, rounded) in zip(names, found.items(), strict=True):
                log.debug("%s: error %.3g, to nearest %.3g", full, rounded.error, rounded.nearest_error)
                packed[name] = rounded.packed
                # Without moments, the error is that of the weight: of another kind than those of the other layers.
                errors = (
                    (rounded.error, rounded.nearest_error) if is_known == self.recipe.needs_moments else (None, None)
                )
                measured[name] = Measured(modules[name].weight.numel() * stored.itemsize, *map(_short, errors))
        return packed, measured


def _short(error: float | None) -> float | None:
    """With three digits: the order in which sums are made, in several processes, does not show."""
    return None if error is None else float(f"{error:.3g}")


def fallback_of(num_tokens: int, num_columns: int, recipe: Recipe) -> str | None:
    """How an expert layer that has read so few tokens is rounded; None if they are enough for its Hessian."""
    needed = math.ceil(TOKENS_PER_COLUMN.get(recipe.method, TOKENS_PER_COLUMN["gptq"]) * num_columns)
    if num_tokens >= needed:
        return None
    how = "rtn" if recipe.scale_search == "none" else "rtn, scales searched without a Hessian"
    return f"{how}: {num_tokens} tokens, and {num_columns} columns need {needed}"


def widest_layer(blocks: Iterable[nn.Module]) -> int:
    """The columns of the widest layer that reads every token: not those of experts."""
    columns = [0]
    for block in blocks:
        inside = experts_prefixes(block)
        columns += [layer.in_features for name, layer in linears(block).items() if not name.startswith(inside)]
    return max(columns)


def warn_of_few_tokens(blocks: Iterable[nn.Module], num_tokens: int, recipe: Recipe) -> None:
    """Warn if there is too little text for the Hessian of the widest layer; experts have a separate rule."""
    if not recipe.needs_moments:
        return
    widest = widest_layer(blocks)
    needed = math.ceil(TOKENS_PER_COLUMN.get(recipe.method, TOKENS_PER_COLUMN["gptq"]) * widest)
    if num_tokens < needed:
        log.warning(
            "%d tokens of text, and layers with %d columns: %s fits weights to these tokens, and errs more on other "
            "text; give %d tokens or more (--num-samples, --length)%s",
            *(num_tokens, widest, recipe.method, needed, ", or --method rtn" if recipe.uses_gptq else ""),
        )


def put_weight(block: nn.Module, name: str, packed: Weight) -> None:
    """Give a layer of the block the values of its packed weight."""
    layer = linears(block)[name]
    layer.weight.data = packed.to(layer.weight.device).dequantize(layer.weight.dtype)


def put_block(block: nn.Module, finished: FinishedBlock) -> None:
    """Put the quantized result into the float block."""
    for name, weight in finished.layers.items():
        put_weight(block, name, weight)
    for name, value in finished.others.items():
        parameter = block.get_parameter(name)
        parameter.data = value.to(parameter)


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
        alone = tuple(stage for stage in stages if not stage[0].startswith(experts_prefixes(block)))
        shared = ScaledInput(reason="layers of experts share their input with what chooses the experts")
        found = {", ".join(stage): shared for stage in stages if stage not in alone}
        folds = {stage: self._fold(block, stage, stages) for stage in alone}
        for part in self.walk.chunks(block, alone):
            smooths = self.recipe_of(f"{path}.{part[0][0]}").smooth
            gathered = {} if smooths else self.walk.moments_together(block, part)
            for stage in part:
                found[", ".join(stage)] = self._scale(block, stage, folds[stage], gathered.get(stage[0]), path)
        return found

    def _fold(self, block: nn.Module, stage: tuple[str, ...], stages: Stages) -> Fold | None:
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
        key = (type(block), stage, stages, shapes)
        if key not in self._folds:
            self._folds[key] = find_fold(block, stage, self.walk.run_first)
        return self._folds[key]

    def _scale(
        self, block: nn.Module, stage: Sequence[str], fold: Fold | None, moments: InputMoments | None, path: str
    ) -> ScaledInput:
        """`moments`: of the input; None for smoothing, which rounds inputs themselves."""
        if fold is None:
            return ScaledInput(reason="no preceding norm or layer can take the scale exactly")
        modules, names = linears(block), {name: f"{path}.{name}" for name in stage}
        weights = [modules[name].weight.detach().float() for name in stage]
        nearest = [nearest_values(self.recipe_of(one), one, self.stored(f"{one}.weight")) for one in names.values()]
        owner = fold.owner.to(weights[0].device)
        if moments is None:
            inputs = self.recipe_of(names[stage[0]]).inputs or SCHEMES["fp8"]
            found = search_smoothing(
                *(self.walk.some_rows(block, stage[0]).float(), len(self.walk.batches), weights, owner, nearest),
                lambda x: InputRounding.of_range(inputs, max(float(x.abs().max()), 1e-12)).rounded(x),
            )
        else:
            found = search_channel_scale(weights, moments.hessian()[0].to(weights[0]), owner, nearest)
        if found.alpha == 0:
            return ScaledInput(0.0, fold.source)
        factor = self._storable(block, fold, 1 / found.scale, path)
        if factor is None:
            return ScaledInput(reason=f"{fold.source} would not hold the scale in the type of the files")
        scale_source(block, fold, factor)
        scale_readers(block, stage, 1 / factor[owner])
        return ScaledInput(found.alpha, fold.source)

    def _storable(self, block: nn.Module, fold: Fold, factor: Tensor, path: str) -> Tensor | None:
        """Factors for which a norm's weights are exact in the files' type; linear layers are rounded later anyway."""
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
