"""Whether a sparsity config fits a model: every glob matches a layer, and the model has weights to prune."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from torch import nn

from sparsebit.config.schema import UnmatchedGlob, without_effect
from sparsebit.config.selectors import Selector, matches, matches_any, near_names
from sparsebit.errors import ConfigError
from sparsebit.sparse.budgets.group_ratios import KINDS, wanted_groups
from sparsebit.sparse.channel_groups import ChannelGroups
from sparsebit.sparse.channels.groups import layers_of
from sparsebit.sparse.channels.parametrized_weights import computed_tensors
from sparsebit.sparse.selecting.element_weights import ElementWeights
from sparsebit.sparse.selecting.residual_blocks import ResidualBlocks
from sparsebit.sparse.sparse_config import BLOCKS, SparseConfig

log = logging.getLogger(__name__)
_MOST_NAMES = 8
_KEY = "SPARSER.GRANULARITY"


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
    layers = [  # modules with parameters of their own; a shared module is listed under each of its names
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if ".parametrizations." not in f".{path}"
        and (next(module.parameters(False), None) is not None or computed_tensors(module))
    ]
    if config.SPARSER.is_of_blocks:
        found = blocks()
        # SPARE may name removable blocks, spared blocks, and layers.
        check_globs(config, [*(block.name for block in found.blocks), *(one.name for one in found.spared), *layers])
        if not found.blocks:
            spared = _reasons((one.name, one.reason) for one in found.spared)
            raise ConfigError(
                f"{_KEY}={BLOCKS}: no residual block that can be removed{spared}; set GRANULARITY: channel"
            )
        return [name for block in found.blocks for name in block.parameters]
    check_globs(config, layers)
    if not config.SPARSER.is_structured:
        if not weights.pruned:
            left = _reasons(weights.left_alone.items(), "left alone")
            raise ConfigError(f"SPARSER.TYPE: the model has no weight that can be masked{left}")
        _warn_of_ratios(config, layers, {layer for name in weights.pruned for layer in weights.layers[name]})
        return weights.pruned
    check_groups(config, groups())
    _warn_of_ratios(config, layers, {layer for group in wanted_groups(groups(), config) for layer in layers_of(group)})
    parameters = dict(model.named_parameters())
    return sorted({tensor for unit in groups().units for tensor, _, _ in unit.members if tensor in parameters})


def _reasons(found: Iterable[tuple[str, str]], word: str = "spared") -> str:
    listed = list(dict.fromkeys(f"{name}: {reason}" for name, reason in found))
    return f"; {word}: {'; '.join(listed[:3])}" if listed else ""


def check_globs(config: SparseConfig, layers: Collection[str]) -> None:
    """Raise if a glob of `SPARE` or `SPECIFIC` has no effect: no layer matches, or an earlier one always wins."""
    sparser = config.SPARSER
    wrong = [
        UnmatchedGlob("SPARSER.SPARE", glob, near_names(glob, layers))
        for glob in sparser.SPARE
        if not any(matches(glob, name) for name in layers)
    ]
    wrong += without_effect("SPARSER.SPECIFIC", Selector(sparser.SPECIFIC), list(layers))
    problems = ""
    for entry in wrong:
        is_part = not entry.behind and any(name.startswith(f"{entry.glob}.") for name in layers)
        problems += (
            f"{entry}" + (f"; {entry.glob!r} holds layers: write {entry.glob + '.*'!r}" if is_part else "") + "\n"
        )
    if problems:
        raise ConfigError(f"{problems}layers with weights: {_listed(layers)}")


def _warn_of_ratios(config: SparseConfig, layers: Collection[str], prunable: Collection[str]) -> None:
    """Warn of entries of `SPECIFIC` that set a ratio for layers of which nothing can be pruned."""
    selector = Selector(config.SPARSER.SPECIFIC)
    for override in selector.overrides:
        named = [name for name in layers if selector.first(name) is override]
        why = ""
        if named and all(matches_any(config.SPARSER.SPARE, name) for name in named):
            why = f"SPARE has {_listed(named)} too"
        elif named and any(value for _, value in override.settings) and not set(named) & set(prunable):
            why = f"nothing of {_listed(named)} can be pruned; smodel.groups and smodel.zeros have the reasons"
        if why:
            log.warning("SPARSER.SPECIFIC: %r has no effect: %s", override.glob, why)


def check_groups(config: SparseConfig, groups: ChannelGroups) -> None:
    """Raise if no channel of the kind in `GRANULARITY` can be removed; warn if no channel at all can be."""
    kind = config.SPARSER.GRANULARITY
    if wanted_groups(groups, config):
        return
    if not groups.groups:
        spared = _reasons((one.tensor, one.reason) for one in groups.spared)
        problem = f"SPARSER.TYPE=structured: no channels of the model can be removed{spared}"
        if kind in KINDS:
            raise ConfigError(f"{_KEY}={kind}: {problem}")
        log.warning("%s", problem)
        return
    kinds = Counter(groups.kind_of(group) for group in groups.groups)
    found = ", ".join(f"{number} groups of kind {name}" for name, number in kinds.items())
    raise ConfigError(
        f"{_KEY}={kind}: the model has no such channels that can be removed; it has {found}; set GRANULARITY to one of "
        "these, or to channel for all"
    )


def _listed(names: Iterable[str]) -> str:
    listed = [name or "(the model)" for name in names]
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    return ", ".join(listed[:_MOST_NAMES]) + more
