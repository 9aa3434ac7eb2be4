"""Which weights unstructured sparsity prunes, which it leaves alone and why, and what share of all of them is zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from sparsebit.sparse.channels.parametrized_weights import computed_tensors
from sparsebit.sparse.sparsers import pruned_weights


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
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = dict(model.named_parameters())
    owners: dict[str, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for own, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(names[id(parameter)], []).append((path, module, own))
    layers, left_alone = {}, {}
    for name, held in owners.items():
        weight = parameters[name]
        is_pruned = any(_is_pruned(module, own, weight) for _, module, own in held)
        reasons = [reason for path, module, own in held if (reason := _reason(module, path, own, weight))]
        if is_pruned or reasons:
            layers[name] = tuple(dict.fromkeys(_layer(path) for path, _, _ in held))
        if not is_pruned and reasons:
            left_alone[name] = reasons[0]
    return ElementWeights(layers, {name: parameters[name].numel() for name in layers}, left_alone)


_PARAMETRIZATION = ".parametrizations."


def _layer(path: str) -> str:
    """The layer of a module: a parametrization belongs to the layer whose weight it computes."""
    return f".{path}".partition(_PARAMETRIZATION)[0].removeprefix(".")


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
