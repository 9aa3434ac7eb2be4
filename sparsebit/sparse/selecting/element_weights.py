"""Which weights unstructured sparsity prunes, which it leaves alone and why, and what share of all weights is zero.

In a weight, single elements, blocks or N of M are pruned: those with the lowest scores, in each layer or over all
layers together. Every parameter with rows and columns is counted in `Zeros`, pruned or not, so the reported sparsity is
that of the whole model. `sparsers.py` holds the table of which parameters of which module classes are pruned.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.sparse.channels.parametrized_weights import computed_tensors
from sparsebit.sparse.scoring.criteria import Evidence
from sparsebit.sparse.scoring.element_masks import (
    block_scores,
    block_shape,
    from_blocks,
    lowest,
    lowest_of_all,
    n_of_m,
    n_of_m_mask,
    num_pruned,
)
from sparsebit.sparse.sparse_config import SparseConfig
from sparsebit.sparse.sparsers import pruned_weights

_PARAMETRIZATION = ".parametrizations."


@dataclass(frozen=True)
class ElementWeights:
    """All weights of a model: every parameter with rows and columns that is not of a norm.

    `layers`: the names of the modules that have each weight; a tied weight has several, and is named as in
    `named_parameters()`. `left_alone`: those that are not pruned, with the reason.
    """

    layers: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]
    left_alone: Mapping[str, str]

    @property
    def pruned(self) -> list[str]:
        return [name for name in self.layers if name not in self.left_alone]


def find_element_weights(model: nn.Module) -> ElementWeights:
    """The weights of a model, as its parameters are now."""
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    owners: defaultdict[str, list[tuple[str, nn.Module, str]]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        for own, parameter in module._parameters.items():
            if parameter is not None:
                owners[names[id(parameter)]].append((path, module, own))
    layers, left_alone = {}, {}
    for name, held in owners.items():
        weight = parameters[name]
        is_pruned = any(_is_pruned(module, own, weight) for _, module, own in held)
        reasons = [reason for path, module, own in held if (reason := _reason(module, path, own, weight))]
        if is_pruned or reasons:
            # A parametrization belongs to the layer whose weight it computes.
            paths = (f".{path}".partition(_PARAMETRIZATION)[0].removeprefix(".") for path, _, _ in held)
            layers[name] = tuple(dict.fromkeys(paths))
        if not is_pruned and reasons:
            left_alone[name] = reasons[0]
    return ElementWeights(layers, {name: parameters[name].numel() for name in layers}, left_alone)


def _is_pruned(module: nn.Module, own: str, weight: Tensor) -> bool:
    kind, globs = pruned_weights(module)
    is_known = kind is not nn.Module or _is_matrix(weight)
    is_computed = isinstance(module, nn.utils.parametrize.ParametrizationList)
    return is_known and not is_computed and weight.dim() > 1 and any(fnmatchcase(own, glob) for glob in globs)


def _is_matrix(weight: Tensor) -> bool:
    """Rows and columns, and not a vector that is broadcast: (1, channels, 1, 1)."""
    return sum(size > 1 for size in weight.shape) > 1


def _reason(module: nn.Module, path: str, own: str, weight: Tensor) -> str:
    """Why a weight is left alone; empty: it is not a weight of a product."""
    if not _is_matrix(weight) or isinstance(module, (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.RMSNorm)):
        return ""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "a table whose rows are looked up"
    if isinstance(module, torch.jit.ScriptModule):
        return "a TorchScript module takes no mask"
    if (f".{path}".endswith(".weight") and _PARAMETRIZATION in f".{path}") or computed_tensors(module):
        return "the layer computes its weight from it, and is spared"
    return f"a parameter of {type(module).__name__}; register_smodule with weights = ({own!r},) prunes it"


def left_alone(
    scores: Mapping[str, Tensor], masks: Mapping[str, Tensor], ratios: Mapping[str, float], config: SparseConfig
) -> dict[str, str]:
    """The weights that have a ratio and cannot be pruned, with the reason; raises if no weight can be pruned.

    Reasons: the criterion has no scores of a weight, or the weight is smaller than the unit of pruning.
    """
    asked = [name for name, ratio in ratios.items() if ratio > 0]
    strategy, granularity = config.SPARSER.STRATEGY, config.SPARSER.GRANULARITY
    small = {name: reason for name in asked if (reason := _too_small(masks[name], granularity))}
    if small and len(small) == len(asked):
        first = f"{asked[0]}: {small[asked[0]]}"
        raise ConfigError(f"SPARSER.GRANULARITY={granularity}: no weight of the model is large enough; {first}")
    missing = [name for name in asked if name not in scores]
    if missing and len(missing) == len(asked):
        raise ConfigError(
            f"SPARSER.STRATEGY={strategy} does not judge {missing[0]}, nor any other weight that is to be pruned; "
            "choose another one, as l1norm"
        )
    reason = f"{strategy} does not judge it: no batch reaches it as a convolution or linear layer"
    return {**dict.fromkeys(missing, reason), **small}


def _too_small(mask: Tensor, granularity: str) -> str:
    rows, columns = mask.flatten(1).shape
    if (pattern := n_of_m(granularity)) and columns < pattern[1]:
        return f"{granularity} takes {pattern[1]} columns, and it has {columns}"
    if (block := block_shape(granularity)) and rows <= block[0] and columns <= block[1] and rows * columns > 1:
        return f"a block of {granularity} is the whole weight, {rows}x{columns}"
    return ""


def select_elements(
    scores: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    layers: Mapping[str, tuple[str, ...]],
    ratios: Mapping[str, float],
    config: SparseConfig,
    share: float,
) -> dict[str, Tensor]:
    """The new masks of the weights that lose elements, by name.

    `masks`: the current ones; pruned elements stay pruned, so that steps of a schedule only add. `layers`: of each
    weight. `ratios`: of each weight, at the end; `share`: the share of these ratios that applies after this step.
    """
    sparser = config.SPARSER
    lowest_first = {name: scores[name].masked_fill(~masks[name], -math.inf) for name in masks if ratios[name] > 0}
    if pattern := n_of_m(sparser.GRANULARITY):
        return {name: n_of_m_mask(score, *pattern) for name, score in lowest_first.items()}
    block = block_shape(sparser.GRANULARITY)
    judged = {name: block_scores(score, block) if block else score for name, score in lowest_first.items()}
    rest = [name for name in judged if sparser.SCOPE == "global" and not config.is_overridden(layers[name])]
    own = {name: score for name, score in judged.items() if name not in rest}
    found = {name: lowest(score, num_pruned(share * ratios[name], score.numel())) for name, score in own.items()}
    if rest:
        total = sum(judged[name].numel() for name in rest)
        parts = lowest_of_all([judged[name] for name in rest], num_pruned(share * sparser.RATIO, total))
        found.update(zip(rest, parts, strict=True))
    return {name: from_blocks(kept, block, masks[name]) if block else kept for name, kept in found.items()}


def with_ratios(
    evidence: Mapping[str, Evidence], config: SparseConfig, layers: Mapping[str, tuple[str, ...]], share: float
) -> dict[str, Evidence]:
    """Evidence of all weights with the config's pattern, and its ratio if it has one for each; `share` as above."""
    sparser = config.SPARSER
    pattern, is_global = n_of_m(sparser.GRANULARITY), sparser.SCOPE == "global"
    found = {}
    for name, entry in evidence.items():
        own = layers.get(name, ())
        is_shared = (is_global and not config.is_overridden(own)) or block_shape(sparser.GRANULARITY)
        found[name] = replace(entry, ratio=None if is_shared else share * config.ratio_of(own), pattern=pattern)
    return found


@dataclass(frozen=True)
class Zeros:
    """How many weights are zero by masks: `num_zeros` of `num_weights`, and by weight. Printing it shows the report.

    `left_alone`: weights that are counted but have no mask, with the reason.
    """

    num_zeros: int
    num_weights: int
    by_weight: Mapping[str, float]
    left_alone: Mapping[str, str]

    @property
    def ratio(self) -> float:
        return self.num_zeros / max(1, self.num_weights)

    def __str__(self) -> str:
        lines = [f"{self.num_zeros:,} of {self.num_weights:,} weights are zero ({self.ratio:.3f})"]
        return "\n".join([*lines, *(f"  left alone  {name}: {reason}" for name, reason in self.left_alone.items())])


def count_zeros(weights: ElementWeights, masks: Mapping[str, Tensor], left_alone: Mapping[str, str]) -> Zeros:
    """Count the zeros that masks (True: kept) put into all weights."""
    counts = {name: int((~masks[name]).sum()) if name in masks else 0 for name in weights.layers}
    by_weight = {name: counts[name] / max(1, size) for name, size in weights.sizes.items()}
    return Zeros(sum(counts.values()), sum(weights.sizes.values()), by_weight, left_alone)
