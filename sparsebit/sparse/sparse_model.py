"""`SparseModel`: the life of a pruned model: find what can go, score it, mask it, train it, make it small."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsebit.config.reading import Source
from sparsebit.deploy.model_file import checked_path, staged, write
from sparsebit.deploy.ports import DynamicAxes
from sparsebit.deploy.stopwatch import Stopwatch
from sparsebit.deploy.to_onnx import to_onnx
from sparsebit.errors import CaptureError, ConfigError
from sparsebit.execution.batches import as_call, calls
from sparsebit.graph.copying import copy_model, uncompiled
from sparsebit.sparse.channel_groups import Group, Unit, positions_of
from sparsebit.sparse.criteria import Evidence, criterion
from sparsebit.sparse.element_masks import block_shape, n_of_m
from sparsebit.sparse.element_selection import select_elements
from sparsebit.sparse.evidence import Loss, gather_evidence
from sparsebit.sparse.example_guess import guessed_example
from sparsebit.sparse.group_search import ChannelGroups, find_groups
from sparsebit.sparse.labels import FIXED
from sparsebit.sparse.latency_table import Clock
from sparsebit.sparse.ratio_config import config_of_ratios
from sparsebit.sparse.ratio_search import (
    CANDIDATES,
    RatioChoice,
    RatioOptions,
    check_budgets,
    group_name,
    ratio_options,
    search_ratios,
)
from sparsebit.sparse.reconstruction import LayerFit, fit_layers
from sparsebit.sparse.run_state import forget_run_state
from sparsebit.sparse.sparse_config import SparseConfig, parse_sconfig
from sparsebit.sparse.sparsers import SPARSERS, Sparser, pruned_weights
from sparsebit.sparse.surgery import apply_plan
from sparsebit.sparse.unit_selection import rounded, select_by_group, select_globally, unit_scores

log = logging.getLogger(__name__)
_SUFFIX = "_mask"


class SparseModel(nn.Module):
    """A copy of a model whose pruned weights are zero and stay zero.

    `config`: what `parse_sconfig` takes. `example_inputs`: a batch, by which channels are found; without one it is
    guessed from the first layer. The copy is `model`: an instance of the user's own class with a mask (a buffer) beside
    every weight that may be pruned. Masks are in force before every forward in training, in `state_dict()` and in
    `eval()`; gradients of pruned weights are zero.
    """

    def __init__(self, model: nn.Module, config: Source | SparseConfig, example_inputs: Any = None) -> None:
        super().__init__()
        self.config = parse_sconfig(config)
        self.model = copy_model(uncompiled(model)).to(self.config.DEVICE)
        # In a tuple: the user's model is not a part of this one.
        self._given = (model,)
        self.example_inputs = example_inputs
        self._groups: ChannelGroups | None = None
        self._before_add: set[str] = set()
        self._ratios: dict[str, float] = {}
        self.register_buffer("steps_done", torch.zeros((), dtype=torch.long))
        self._masked = self._maskable()
        for name in self._masked:
            module, parameter = self._owner(name)
            if hasattr(module, parameter + _SUFFIX):
                raise ConfigError(f"{name}{_SUFFIX} is taken: a mask would need this name; rename it in your model")
            weight: Tensor = getattr(module, parameter)
            module.register_buffer(parameter + _SUFFIX, torch.ones_like(weight, dtype=torch.bool))
            if weight.requires_grad:
                weight.register_hook(_MaskGradient(module, parameter + _SUFFIX))

    # What is found

    @property
    def groups(self) -> ChannelGroups:
        """The channel groups, found (and proved) when they are first asked for. Its text is the report."""
        if self._groups is None:
            self._groups = find_groups(self.model, self.example_batch)
        return self._groups

    @property
    def example_batch(self) -> Any:
        """The batch by which channels are found: the one that was given, or a guess."""
        if self.example_inputs is None:
            self.example_inputs = guessed_example(self.model)
        return self.example_inputs

    @property
    def masks(self) -> dict[str, Tensor]:
        """The mask of every weight that may be pruned, by the weight's name in `model`."""
        return {name: getattr(self._owner(name)[0], self._owner(name)[1] + _SUFFIX) for name in self._masked}

    @property
    def sparsity(self) -> dict[str, float]:
        """The share of zeros that masks put into each weight."""
        return {name: 1 - float(mask.float().mean()) for name, mask in self.masks.items()}

    def disable_sparse_before_add(self) -> None:
        """Leave the layers alone whose outputs are added to others: the channels of residual streams."""
        sets = self.groups.bench.sets
        added: set[int] = set()
        for step in self.groups.bench.steps:
            found = [axes for _, axes in step.inputs if len(axes) > 1]
            labelled = [[labels for labels in axes if labels is not None] for axes in found]
            if step.name in ("add", "add_") and sum(map(bool, labelled)) > 1:
                added |= {sets.find(x) for axes in labelled for labels in axes for x in labels.tolist() if x > FIXED}
        self._before_add = {
            axis.tensor
            for axis in sets.axes
            if axis.dim == 0 and any(sets.find(axis.first + place) in added for place in range(axis.size))
        }

    # Masks

    def calc_params(self, batches: Iterable[Any] | None = None, loss: Loss | None = None) -> None:
        """Compute the masks of the next step of the schedule (the only one, by default) and put zeros in.

        `batches`, `loss`: for criteria that need data: batches of inputs, and (outputs, batch) -> scalar.
        """
        self.apply_masks()
        sparser = self.config.SPARSER
        share = self.config.SCHEDULE.share(int(cast("Tensor", self.steps_done)) + 1)
        if sparser.is_structured or sparser.TYPE == "unstructured":
            rule = criterion(sparser.STRATEGY)
            evidence = gather_evidence(self.model, rule.needs, batches, loss, sparser.STRATEGY)
            if not sparser.is_structured:
                evidence = {name: self._with_ratio(entry, share) for name, entry in evidence.items()}
            scores = {name: found for name, entry in evidence.items() if (found := rule.score(entry)) is not None}
            if sparser.is_structured:
                self._mask_units(self._chosen_units(scores, share))
            else:
                self._mask_elements(scores, share)
            if rule.update is not None:
                for name, mask in self.masks.items():
                    self._write(name, rule.update(evidence[name], mask))
        else:
            self._mask_by_sparser(cast("type[Sparser]", SPARSERS.get(sparser.TYPE)), share)
        cast("Tensor", self.steps_done).add_(1)
        self.apply_masks()
        if self._groups is not None:
            forget_run_state(self.model, self._groups.bench.model)

    def _with_ratio(self, evidence: Evidence, share: float) -> Evidence:
        """With what the config asks for in the layer, where it asks for something in each."""
        sparser, layer = self.config.SPARSER, evidence.name.rpartition(".")[0]
        is_shared = sparser.SCOPE == "global" and not self.config.is_overridden((layer,))
        ratio = None if is_shared or block_shape(sparser.GRANULARITY) else share * self.config.ratio_of(layer)
        return replace(evidence, ratio=ratio, pattern=n_of_m(sparser.GRANULARITY))

    @torch.no_grad()
    def _write(self, name: str, weight: Tensor) -> None:
        self.model.get_parameter(name).copy_(weight)

    @torch.no_grad()
    def apply_masks(self) -> None:
        """Put zeros where the masks have them."""
        for name, mask in self.masks.items():
            module, parameter = self._owner(name)
            getattr(module, parameter).masked_fill_(~mask, 0)

    def rewind(self, state: Mapping[str, Tensor]) -> None:
        """Take weights of an earlier time (a state_dict of the model that was given) and keep the masks."""
        own = self.model.state_dict()
        if missing := sorted(set(state) - set(own)):
            raise ConfigError(f"rewind: the state has {missing[0]}, which the model does not have")
        self.model.load_state_dict(dict(state), strict=False)
        self.apply_masks()

    def _chosen_units(self, scores: Mapping[str, Tensor], share: float) -> list[Unit]:
        sparser, groups = self.config.SPARSER, self._wanted_groups()
        layers = [_layers_of(group) for group in groups]
        ratios = [
            0.0
            if self._is_before_add(group)
            else share * self._ratios.get(group_name(group), self.config.ratio_of(names))
            for group, names in zip(groups, layers, strict=True)
        ]
        kept = [index for index, ratio in enumerate(ratios) if ratio > 0]
        groups, layers, ratios = [groups[i] for i in kept], [layers[i] for i in kept], [ratios[i] for i in kept]
        found = [unit_scores(group, scores, sparser.STRATEGY) for group in groups]
        if sparser.SCOPE == "layer":
            return select_by_group(groups, found, ratios)
        own = [index for index, names in enumerate(layers) if self.config.is_overridden(names)]
        rest = [index for index in range(len(groups)) if index not in own]
        return [
            *select_by_group([groups[i] for i in own], [found[i] for i in own], [ratios[i] for i in own]),
            *select_globally([groups[i] for i in rest], [found[i] for i in rest], share * sparser.RATIO),
        ]

    def _wanted_groups(self) -> list[Group]:
        name = self.config.SPARSER.GRANULARITY
        wanted = name if name in ("filter", "head", "neuron") else ""
        return [group for group in self.groups.groups if not wanted or self.groups.kind_of(group) == wanted]

    def choose_ratios(
        self,
        budgets: Mapping[str, float],
        batches: Iterable[Any],
        *,
        candidates: Sequence[float] = CANDIDATES,
        loss: Loss | None = None,
        round_to: int = 1,
        num_threads: int = 1,
        stopwatch: Stopwatch | None = None,
    ) -> RatioChoice:
        """Choose the ratio of each group such that the smaller model keeps the budgets; `calc_params` then uses them.

        `budgets`: `{"macs": 0.7}`, of `macs`, `bytes`, `latency`; up to 1 it is a share of the dense model, above 1 a
        number (of MACs for one sample). `batches`: what an option costs is the change of the model's output on them; a
        few dozen inputs are enough. Groups that `SPARE` or `SPECIFIC` name keep what the config says. The sizes are
        those of the model that `shrink(round_to)` gives, counted.

        `latency`: the time of one sample in ONNX Runtime on this machine, with `num_threads`, as a share of the dense
        float file's. Layers are timed at several widths; the smaller model is exported and timed, and chosen anew until
        it is within 5 % of what was asked. `stopwatch`: what measures, for tests.
        """
        check_budgets(budgets)
        listed = list(batches)
        options = self.ratio_options(listed, candidates=candidates, loss=loss, round_to=round_to)
        model, device = self.masked_model().eval(), next(self.model.parameters()).device
        choice = search_ratios(
            *(model, options, budgets),
            plan=self.groups.plan,
            example=self.example_batch,
            clock=lambda: Clock(
                model, next(iter(calls(listed, model, device))), self.groups.plan, num_threads, stopwatch
            ),
        )
        self._ratios = dict(choice.ratios)
        return choice

    def ratio_options(
        self,
        batches: Iterable[Any],
        *,
        candidates: Sequence[float] = CANDIDATES,
        loss: Loss | None = None,
        round_to: int = 1,
    ) -> RatioOptions:
        """What each ratio of each group would cost, measured on the batches: what `choose_ratios` chooses from."""
        sparser = self.config.SPARSER
        if not sparser.is_structured or sparser.SCOPE == "global":
            raise ConfigError(
                f"choose_ratios: SPARSER.TYPE={sparser.TYPE}, SCOPE={sparser.SCOPE}: it gives each group of channels "
                "a ratio of its own; set TYPE: structured and SCOPE: layer"
            )
        listed = list(batches)
        rule = criterion(sparser.STRATEGY)
        evidence = gather_evidence(self.model, rule.needs, listed, loss, sparser.STRATEGY)
        scores = {name: found for name, entry in evidence.items() if (found := rule.score(entry)) is not None}
        groups = {group_name(group): group for group in self._wanted_groups()}
        return ratio_options(
            self.masked_model().eval(),
            groups,
            {name: unit_scores(group, scores, sparser.STRATEGY) for name, group in groups.items()},
            {name: self._candidates(group, candidates) for name, group in groups.items()},
            calls=list(calls(listed, self.model, next(self.model.parameters()).device)),
            sizes=self.groups.bench.sizes,
            round_to=round_to,
        )

    def config_of(self, ratios: Mapping[str, float]) -> SparseConfig:
        """The config that alone gives each group this ratio (`RatioChoice.ratios`), by the names of its layers."""
        layers = {group_name(group): _layers_of(group) for group in self._wanted_groups()}
        return config_of_ratios(self.config, {name: layers[name] for name in ratios}, ratios)

    def _candidates(self, group: Group, candidates: Sequence[float]) -> list[float]:
        names = _layers_of(group)
        if self._is_before_add(group):
            return [0.0]
        if self.config.is_overridden(names):
            return [self.config.ratio_of(names)]
        return sorted({0.0, *candidates})

    def _is_before_add(self, group: Group) -> bool:
        return any(dim == 0 and tensor in self._before_add for tensor, dim in group.axes)

    def _mask_units(self, dead: Sequence[Unit]) -> None:
        masks = self.masks
        for mask in masks.values():
            mask.fill_(True)
        for (tensor, dim), places in positions_of(dead).items():
            if tensor in masks:
                masks[tensor].index_fill_(dim, torch.tensor(places, device=masks[tensor].device), False)

    def _mask_elements(self, scores: Mapping[str, Tensor], share: float) -> None:
        masks = self.masks
        found = select_elements(scores, masks, self.config, share, frozenset(self._before_add))
        for name, mask in masks.items():
            mask.copy_(found[name] if name in found else torch.ones_like(mask))

    def _mask_by_sparser(self, kind: type[Sparser], share: float) -> None:
        for name, mask in self.masks.items():
            ratio = 0.0 if name in self._before_add else share * self.config.ratio_of(name.rpartition(".")[0])
            module, parameter = self._owner(name)
            found = kind(self.config, name, ratio).calc_mask(getattr(module, parameter).detach())
            if found.shape != mask.shape:
                shapes = f"{tuple(found.shape)} for {name}, a weight of {tuple(mask.shape)}"
                raise ConfigError(f"{kind.__name__}.calc_mask gave a mask of {shapes}")
            mask.copy_(found.bool())

    def _maskable(self) -> list[str]:
        if self.config.SPARSER.is_structured:
            parameters = dict(self.model.named_parameters())
            return sorted({t for unit in self.groups.units for t, _, _ in unit.members if t in parameters})
        found: dict[int, str] = {}
        for path, module in self.model.named_modules():
            for name in pruned_weights(module):
                weight = getattr(module, name, None)
                if isinstance(weight, nn.Parameter):
                    found.setdefault(id(weight), f"{path}.{name}" if path else name)
        return list(found.values())

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, parameter = name.rpartition(".")
        return self.model.get_submodule(path), parameter

    # After pruning

    def reconstruct(
        self, batches: Iterable[Any], teacher: nn.Module | None = None, *, max_rows: int = 32768
    ) -> dict[str, LayerFit]:
        """Fit the weights that are left, layer by layer, to what the dense model computes; gives what each one gained.

        `batches`: a few hundred inputs, without labels. `teacher`: the dense model, by default the one that was given
        at first. Call it after `calc_params` and before training: the weights are fitted anew from the dense ones, in
        closed form. `max_rows`: about so many positions of a layer's input are read; fewer are faster.
        """
        dense = uncompiled(self._given[0] if teacher is None else teacher)
        self.apply_masks()
        found = fit_layers(self.model, dense, self.masks, batches, max_rows=max_rows)
        self.apply_masks()
        if found:
            before, after = (
                sum(getattr(fit, kind) for fit in found.values()) / len(found) for kind in ("before", "after")
            )
            log.info("reconstruction: %d layers, mean error %.3g -> %.3g", len(found), before, after)
        return found

    # Life

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            self.apply_masks()
        return self.model(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As every module's, with the zeros in place."""
        self.apply_masks()
        return super().state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> SparseModel:
        """As every module's; leaving training puts the zeros in once more."""
        if not mode and hasattr(self, "_masked"):
            self.apply_masks()
        return super().train(mode)

    def dead_units(self) -> list[Unit]:
        """The units all of whose weights are masked."""
        masks = self.masks
        # For each axis: whether anything of a position is left.
        left = {
            (name, dim): mask.movedim(dim, 0).flatten(1).any(1).tolist() if mask.dim() > 1 else mask.tolist()
            for name, mask in masks.items()
            for dim in range(mask.dim())
        }

        def is_dead(unit: Unit) -> bool:
            members = [(left[tensor, dim], places) for tensor, dim, places in unit.members if tensor in masks]
            return bool(members) and not any(axis[place] for axis, places in members for place in places)

        return [unit for unit in self.groups.units if is_dead(unit)]

    def shrink(self, round_to: int = 1) -> nn.Module:
        """A plain, smaller model of the user's own class, equal to this one.

        Channels that are masked as a whole are removed. `round_to`: as many of them stay (as zeros) as make every
        width that was a multiple of it a multiple again, which kernels like.
        """
        if not self.config.SPARSER.is_structured:
            raise ConfigError(
                f"shrink: SPARSER.TYPE={self.config.SPARSER.TYPE} masks single weights, and no channel as a whole; "
                "set TYPE: structured"
            )
        dead = self.dead_units()
        if round_to > 1:
            dead = rounded(self.groups.groups, dead, self.groups.bench.sizes, round_to)
        if failure := self.groups.bench.compare(dead, self.groups.rules):
            raise CaptureError(f"shrink: the smaller model is not the masked one: {failure.reason}; SPARE these layers")
        small = self.masked_model()
        forget_run_state(small, self.groups.bench.model)
        apply_plan(small, self.groups.plan(dead))
        return small

    def masked_model(self) -> nn.Module:
        """A plain copy of the model with zeros in its weights and no masks."""
        self.apply_masks()
        plain = copy_model(self.model)
        for parameter in plain.parameters():
            hooks: Any = parameter._backward_hooks
            for key in [key for key, hook in (hooks or {}).items() if isinstance(hook, _MaskGradient)]:
                del hooks[key]
        for name in self._masked:
            path, _, parameter_name = name.rpartition(".")
            delattr(plain.get_submodule(path), parameter_name + _SUFFIX)
        return plain

    def export_onnx(
        self,
        dummy_data: Any,
        name: str | os.PathLike[str],
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        dynamic_axes: DynamicAxes | None = None,
        opset_version: int = 21,
        verbose: bool = False,
    ) -> None:
        """Write the masked model, in float, as an ONNX file; of a smaller model use `shrink` and its own export."""
        target = checked_path(name)
        plain = self.masked_model().eval()
        args, kwargs = as_call(dummy_data, plain)
        model = to_onnx(
            plain,
            args,
            kwargs,
            signature=inspect.signature(plain.forward),
            input_names=input_names,
            output_names=output_names,
            dynamic_axes=dynamic_axes,
            opset_version=opset_version,
            verbose=verbose,
        )
        with staged(target) as path:
            write(model, path)


def _layers_of(group: Group) -> tuple[str, ...]:
    return tuple(sorted({tensor.rpartition(".")[0] for tensor, _ in group.axes}))


class _MaskGradient:
    """Gradients of pruned weights are zero, so that an optimizer leaves them alone."""

    def __init__(self, module: nn.Module, mask: str) -> None:
        self.module, self.mask = module, mask

    def __call__(self, gradient: Tensor) -> Tensor:
        mask: Tensor = getattr(self.module, self.mask)
        return gradient * mask
