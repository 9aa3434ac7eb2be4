"""`Bench`: a model with labelled channels, and its two versions without some units: one masked, one smaller."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from sparsebit.execution.batches import Call
from sparsebit.graph.values.copying import copy_model
from sparsebit.sparse.channels.groups import Unit, kept_positions, positions_of
from sparsebit.sparse.channels.labels import FIXED, LabelSets
from sparsebit.sparse.channels.trace import Trace, TracedCall
from sparsebit.sparse.channels.wide_groups import WideGroups
from sparsebit.sparse.proof.scenes import Scene
from sparsebit.sparse.shrinking.surgery import Attribute, ChannelPlan, apply_plan, named_tensors


@dataclass(frozen=True)
class SizeRule:
    """An attribute of a module (or one item of it) that must be the number of surviving labels."""

    module: str
    attribute: str
    item: int | None
    labels: tuple[int, ...]
    # Where in the module's forward the size was seen.
    source: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Bench:
    """A model, an example call and the labels of one traced run: the inputs of every comparison.

    `computed`: convolutions whose weights are computed once, when channels go. `scenes`: other ways to run the model.
    `rules`: the attributes that a smaller model changes.
    """

    model: nn.Module
    call: Call
    trace: Trace
    sets: LabelSets
    computed: Mapping[str, str] = field(default_factory=dict)
    wide: WideGroups = field(default_factory=WideGroups)
    scenes: Sequence[Scene] = ()
    rules: tuple[SizeRule, ...] = ()

    @property
    def steps(self) -> list[TracedCall]:
        return self.trace.steps

    @cached_property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of parameters and buffers."""
        return {name: tuple(tensor.shape) for name, tensor in named_tensors(self.model).items()}

    def plan(self, dead: Sequence[Unit]) -> ChannelPlan:
        """The plan that removes these units."""
        alive = self.alive({unit.label for unit in dead})
        wide = [self.wide.leaving(unit) for unit in dead if unit.label in self.wide.reasons]
        kept = kept_positions([unit for unit in dead if unit.label not in self.wide.reasons], self.sizes)
        spread: dict[str, tuple[str, ...]] = {}
        for tensor, dims in kept_positions(wide, self.sizes).items():
            kept.setdefault(tensor, {}).update(dims)
            path, _, own = tensor.rpartition(".")
            if own == "weight":
                spread[path] = tuple("out" if dim == 0 else "in" for dim in sorted(dims))
        attributes: dict[str, dict[str, Attribute]] = {}
        # Rules of one tuple attribute each change one item of the value that the rules before them have left.
        for rule in (*self.rules, *self._group_rules()):
            size = int(alive[torch.tensor(rule.labels).clamp(min=FIXED)].sum())
            module = self.model.get_submodule(rule.module)
            value = attributes.get(rule.module, {}).get(rule.attribute, getattr(module, rule.attribute))
            changed: Attribute = size
            if rule.item is not None:
                items = list(value)
                items[rule.item] = size
                changed = type(value)(items)
            if changed != getattr(module, rule.attribute):
                attributes.setdefault(rule.module, {})[rule.attribute] = changed
        return ChannelPlan(
            {tensor: {dim: tuple(places.tolist()) for dim, places in dims.items()} for tensor, dims in kept.items()},
            attributes,
            computed=self.computed if kept else {},
            spread=spread,
        )

    def _group_rules(self) -> Iterator[SizeRule]:
        """The numbers of groups of convolutions and group norms."""
        for step in self.steps:
            if step.groups is None:
                continue
            module = self.model.get_submodule(step.where)
            name = "num_groups" if isinstance(module, nn.GroupNorm) else "groups"
            if isinstance(module, (nn.modules.conv._ConvNd, nn.GroupNorm)):
                yield SizeRule(step.where, name, None, tuple(step.groups.tolist()))

    def alive(self, gone: set[int]) -> Tensor:
        """For every label: whether activations keep it. Wide groups leave layers only, so activations keep them."""
        is_alive = torch.ones(len(self.sets), dtype=torch.bool)
        is_alive[torch.tensor(sorted(gone - self.wide.reasons.keys()), dtype=torch.long)] = False
        return is_alive[self.sets.roots()]

    def expected(self, step: TracedCall, alive: Tensor) -> tuple[tuple[int | None, ...], ...]:
        """The sizes of a step's outputs after the removal; None: not known."""
        return tuple(
            tuple(_count(labels, size, alive) for labels, size in zip(axes, shape, strict=True))
            for axes, shape in zip(step.outputs, step.shapes, strict=True)
        )

    def masked(self, dead: Sequence[Unit]) -> nn.Module:
        """A copy with zeros in every parameter of the units; buffers stay."""
        touched = {tensor for tensor, _ in positions_of(dead)}
        others = [parameter for name, parameter in self.model.named_parameters() if name not in touched]
        copied = copy_model(self.model, share=others)
        mask_units(copied, dead)
        return copied

    def shrunk(self, dead: Sequence[Unit]) -> nn.Module:
        """A smaller copy without the units."""
        plan = self.plan(dead)
        # A computed weight mixes input channels (a mean over them). To equal the masked model's, it has to be computed
        # from the masked parameters, before channels are removed.
        copied = self.masked(dead) if self.computed else copy_model(self.model, share_parameters=True)
        apply_plan(copied, plan)
        return copied


def _count(labels: Tensor | None, size: int, alive: Tensor) -> int | None:
    if labels is None:
        return size
    return None if bool((labels < FIXED).any()) else int(alive[labels].sum())


def mask_units(model: nn.Module, units: Iterable[Unit]) -> None:
    """Put zeros into every parameter of the units, in place."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for (tensor, dim), places in positions_of(units).items():
            if tensor in parameters:
                parameters[tensor].index_fill_(dim, torch.tensor(places, device=parameters[tensor].device), 0)
