"""`BlockRounding`: the weights of one block, rounded stage by stage, each on the outputs of those before.

Layers of a stage read the same input, so they share its second moments and are rounded together. A stage is rounded
after the earlier stages of its block have their rounded weights. Expert layers are different: each one reads its
own tokens, and one that too few tokens reach is rounded without them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from sparsebit.llm.checkpoint.finished_block import FinishedBlock
from sparsebit.llm.layers.float_weight import Weight, integers
from sparsebit.llm.models.architectures import Stages, linears, passes_of
from sparsebit.llm.models.separate_experts import experts_in
from sparsebit.llm.quantizing.block_walk import BlockWalk
from sparsebit.llm.quantizing.channel_scaling import ChannelScaling
from sparsebit.llm.quantizing.learned_rounding import learn_rounding
from sparsebit.llm.quantizing.rounding import round_weights
from sparsebit.llm.recipe import Recipe
from sparsebit.numerics.rounding.hessian import InputMoments

log = logging.getLogger(__name__)
# An expert layer that reads fewer tokens than this for each of its columns is rounded without its Hessian: the method
# would fit the weight to the few tokens, with larger errors on others. Other layers only cause a warning. Measured on
# a layer of book-llama with 512 columns: GPTQ's error on other tokens is 1.8 times that of rounding to nearest with 1
# token a column, 1.08 with 2, 0.78 with 8.
TOKENS_PER_COLUMN = {"rtn": 0.25, "gptq": 3.0, "awq": 0.25, "autoround": 0.25}


class BlockRounding:
    """`recipe_of(layer)`: the recipe of a layer by its name in the model. `stored(name)`: a tensor's type in files."""

    def __init__(
        self, walk: BlockWalk, recipe: Recipe, recipe_of: Callable[[str], Recipe], stored: Callable[[str], torch.dtype]
    ) -> None:
        self.walk, self.recipe, self.recipe_of, self.stored = walk, recipe, recipe_of, stored
        self._scaling = ChannelScaling(walk, recipe_of, stored)

    def round(self, original: nn.Module, changed: nn.Module, stages: Stages, path: str) -> FinishedBlock:
        """Round the block at `path` of the model; `changed`, a copy of it, gets the rounded weights."""
        scales = self._scaling.apply(changed, stages, path) if self.recipe.method == "awq" else {}
        packed: dict[str, Weight] = {}
        tokens: dict[str, int] = {}
        for group in passes_of(changed, stages):
            for part in self._parts(changed, group):
                gathered = self._moments(original, changed, part)
                for stage in part:
                    moments = gathered.pop(stage[0], None)
                    if moments is not None:
                        tokens |= {name: moments.num_rows for name in stage if _is_expert(changed, name)}
                    packed |= self._round_stage(changed, stage, moments, tokens, path)
                    for name in stage:
                        put_weight(changed, name, packed[name])
        if self.recipe.method == "autoround":
            packed |= self._learned(original, changed, packed, tokens, path)
        return FinishedBlock(packed, tokens, _others(original, changed, packed, path, self.stored), scales)

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
        found = learn_rounding(self.walk, changed, floats.__getitem__, chosen, steps=self.recipe.steps, name=path)
        return dict(found)

    def _parts(self, block: nn.Module, group: Stages) -> Iterable[Stages]:
        return self.walk.chunks(block, group) if self.recipe.needs_text else (group,)

    def _moments(self, original: nn.Module, changed: nn.Module, part: Stages) -> dict[str, InputMoments]:
        """Second moments of the input of each stage, by its first layer; none, if no text is needed."""
        if not self.recipe.needs_text:
            return {}
        if _is_expert(changed, part[0][0]):
            return self.walk.moments_together(changed, part)
        return {stage[0]: self.walk.moments(original, changed, stage) for stage in part}

    def _round_stage(
        self,
        block: nn.Module,
        stage: Sequence[str],
        moments: InputMoments | None,
        tokens: Mapping[str, int],
        path: str,
    ) -> dict[str, Weight]:
        """The layers of a stage; those that are rounded alike are rounded together. The moments are consumed."""
        modules, kinds = linears(block), dict[tuple[Recipe, torch.dtype, bool], list[str]]()
        for name in stage:
            full = f"{path}.{name}"
            recipe, is_known = self.recipe_of(full), moments is not None
            if name in tokens and fallback_of(tokens[name], modules[name].in_features, recipe) is not None:
                recipe, is_known = recipe.without_text(), False
            kinds.setdefault((recipe, self.stored(f"{full}.weight"), is_known), []).append(name)
        packed: dict[str, Weight] = {}
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
        return packed


def fallback_of(num_tokens: int, num_columns: int, recipe: Recipe) -> str | None:
    """How an expert layer that has read so few tokens is rounded; None if they are enough for its Hessian."""
    needed = math.ceil(TOKENS_PER_COLUMN[recipe.method] * num_columns)
    if num_tokens >= needed:
        return None
    how = "rtn" if recipe.scale_search == "none" else "rtn, scales searched without a Hessian"
    return f"{how}: {num_tokens} tokens, and {num_columns} columns need {needed}"


def widest_layer(blocks: Iterable[nn.Module]) -> int:
    """The columns of the widest layer that reads every token: not those of experts."""
    columns = [
        layer.in_features for block in blocks for name, layer in linears(block).items() if not _is_expert(block, name)
    ]
    return max(columns, default=0)


def warn_of_few_tokens(blocks: Iterable[nn.Module], num_tokens: int, recipe: Recipe) -> None:
    """Warn if there is too little text for the Hessian of the widest layer; experts have a separate rule."""
    if not recipe.needs_text:
        return
    widest = widest_layer(blocks)
    needed = math.ceil(TOKENS_PER_COLUMN[recipe.method] * widest)
    if num_tokens < needed:
        log.warning(
            "%d tokens of text, and layers with %d columns: %s fits weights to these tokens, and errs more on other "
            "text; give %d tokens or more (--num-samples, --length)%s",
            *(num_tokens, widest, recipe.method, needed, ", or --method rtn" if recipe.method == "gptq" else ""),
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


def _others(
    original: nn.Module,
    changed: nn.Module,
    packed: Iterable[str],
    path: str,
    stored: Callable[[str], torch.dtype],
) -> dict[str, Tensor]:
    """The parameters besides packed weights that the method has changed, such as norms, in the type of the files."""
    weights, before = {f"{name}.weight" for name in packed}, dict(original.named_parameters())
    return {
        name: parameter.detach().to(stored(f"{path}.{name}")).cpu()
        for name, parameter in changed.named_parameters()
        if name not in weights and not torch.equal(parameter, before[name])
    }


def _is_expert(block: nn.Module, name: str) -> bool:
    return any(name.startswith(f"{path}.") for path in experts_in(block))
