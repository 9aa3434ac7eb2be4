"""Whether a sparsity config fits a model: every glob names a layer, and the model has what is to be pruned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from torch import nn

from sparsebit.config.schema import UnmatchedGlob, without_effect
from sparsebit.config.selectors import Selector, matches, matches_any, near_names
from sparsebit.errors import ConfigError
from sparsebit.sparse.budgets.group_ratios import KINDS, wanted_groups
from sparsebit.sparse.channels.groups import layers_of
from sparsebit.sparse.channels.parametrized_weights import computed_tensors
from sparsebit.sparse.group_search import ChannelGroups
from sparsebit.sparse.selecting.element_weights import ElementWeights
from sparsebit.sparse.selecting.residual_blocks import ResidualBlocks
from sparsebit.sparse.sparse_config import BLOCKS, SparseConfig

log = logging.getLogger(__name__)
_MOST_NAMES = 8


def maskable_weights(
    model: nn.Module,
    config: SparseConfig,
    weights: ElementWeights,
    groups: Callable[[], ChannelGroups],
    blocks: Callable[[], ResidualBlocks],
) -> list[str]:
    """The names of the weights that get masks; raises if the config does not fit the model.

    `groups`, `blocks`: functions that find them, called only if the config concerns them.
    """
    layers = layers_with_weights(model)
    if config.SPARSER.is_of_blocks:
        found = blocks()
        check_globs(config, [*block_names(found), *layers])
        check_blocks(found)
        return [name for block in found.blocks for name in block.parameters]
    check_globs(config, layers)
    if not config.SPARSER.is_structured:
        check_elements(weights)
        _warn_of_ratios(config, layers, {layer for name in weights.pruned for layer in weights.layers[name]})
        return weights.pruned
    check_groups(config, groups())
    _warn_of_ratios(config, layers, {layer for group in wanted_groups(groups(), config) for layer in layers_of(group)})
    parameters = dict(model.named_parameters())
    return sorted({tensor for unit in groups().units for tensor, _, _ in unit.members if tensor in parameters})


def layers_with_weights(model: nn.Module) -> list[str]:
    """The names of all modules that have parameters of their own, under every name that they have."""
    return [
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if ".parametrizations." not in f".{path}"
        and (any(True for _ in module.parameters(recurse=False)) or computed_tensors(module))
    ]


def check_globs(config: SparseConfig, layers: Collection[str]) -> None:
    """Raise if a glob of `SPARE` or `SPECIFIC` has no effect: no layer matches, or an earlier one always wins."""
    sparser = config.SPARSER
    wrong = [
        UnmatchedGlob("SPARSER.SPARE", glob, near_names(glob, layers))
        for glob in sparser.SPARE
        if not any(matches(glob, name) for name in layers)
    ]
    wrong += without_effect("SPARSER.SPECIFIC", Selector(sparser.SPECIFIC), list(layers))
    if not wrong:
        return
    hints = [
        f"; {entry.glob!r} holds layers: write {entry.glob + '.*'!r}"
        if not entry.behind and any(name.startswith(f"{entry.glob}.") for name in layers)
        else ""
        for entry in wrong
    ]
    told = "\n".join(f"{entry}{hint}" for entry, hint in zip(wrong, hints, strict=True))
    raise ConfigError(f"{told}\nlayers with weights: {_listed(layers)}")


def _warn_of_ratios(config: SparseConfig, layers: Collection[str], prunable: Collection[str]) -> None:
    """Warn of entries of `SPECIFIC` that set a ratio for layers of which nothing can be pruned."""
    selector = Selector(config.SPARSER.SPECIFIC)
    for override in selector.overrides:
        named = [name for name in layers if selector.first(name) is override]
        if named and all(matches_any(config.SPARSER.SPARE, name) for name in named):
            log.warning("SPARSER.SPECIFIC: %r has no effect: SPARE has %s too", override.glob, _listed(named))
            continue
        if named and any(value for _, value in override.settings) and not set(named) & set(prunable):
            log.warning(
                "SPARSER.SPECIFIC: %r has no effect: nothing of %s can be pruned; smodel.groups and smodel.zeros have "
                "the reasons",
                override.glob,
                _listed(named),
            )


def check_groups(config: SparseConfig, groups: ChannelGroups) -> None:
    """Raise if no channel of the kind in `GRANULARITY` can be removed; warn if no channel at all can be."""
    if wanted_groups(groups, config):
        return
    if not groups.groups:
        reasons = list(dict.fromkeys(f"{entry.tensor}: {entry.reason}" for entry in groups.spared))
        problem = "SPARSER.TYPE=structured: no channels of the model can be removed; spared: " + "; ".join(reasons[:3])
        if config.SPARSER.GRANULARITY in KINDS:
            raise ConfigError(f"SPARSER.GRANULARITY={config.SPARSER.GRANULARITY}: {problem}")
        log.warning("%s", problem)
        return
    kinds = [groups.kind_of(group) for group in groups.groups]
    found = ", ".join(f"{kinds.count(kind)} groups of kind {kind}" for kind in dict.fromkeys(kinds))
    raise ConfigError(
        f"SPARSER.GRANULARITY={config.SPARSER.GRANULARITY}: the model has no such channels that can be removed; it has "
        f"{found}; set GRANULARITY to one of these, or to channel for all"
    )


def check_blocks(blocks: ResidualBlocks) -> None:
    """Raise if no residual block can be removed."""
    if not blocks.blocks:
        reasons = [f"{entry.name}: {entry.reason}" for entry in blocks.spared]
        raise ConfigError(
            f"SPARSER.GRANULARITY={BLOCKS}: the model has no residual block that can be removed"
            f"{'; spared: ' if reasons else ''}{'; '.join(reasons[:3])}; set GRANULARITY: channel"
        )


def check_elements(weights: ElementWeights) -> None:
    """Raise if the model has no weight that single elements can be pruned from."""
    if not weights.pruned:
        reasons = [f"{name}: {reason}" for name, reason in weights.left_alone.items()]
        raise ConfigError(
            f"SPARSER.TYPE: the model has no weights that masks can be for{'; left alone: ' if reasons else ''}"
            + "; ".join(reasons[:3])
        )


def block_names(blocks: ResidualBlocks) -> list[str]:
    """The names that a config may use for blocks: of those that can be removed, and of those that stay."""
    return [*(block.name for block in blocks.blocks), *(entry.name for entry in blocks.spared)]


def _listed(names: Iterable[str]) -> str:
    listed = [name or "(the model)" for name in names]
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    return ", ".join(listed[:_MOST_NAMES]) + more
