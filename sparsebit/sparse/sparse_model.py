"""`SparseModel`: one model through all steps of pruning: find what can be removed, score, mask, train, shrink.

`calc_params` makes the masks of one step: `scoring/` scores weights, `selecting/` makes masks of the scores.
`choose_ratios` finds the ratio of each group under a budget (`budgets/`). `shrink` removes what is masked as a whole
(`shrinking/`). Groups and blocks are searched on first access, because a search runs the model many times.

Invariant: a masked weight is zero in every forward, in `state_dict()` and in copies (`selecting/weight_masks.py`), and
the user's model is never changed.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsebit.config.reading import Source
from sparsebit.deploy.audit.file_latency import Stopwatch
from sparsebit.deploy.exporting.to_onnx import OnnxOptions, to_onnx
from sparsebit.deploy.onnx_graph.io_names import DynamicAxes
from sparsebit.deploy.onnx_graph.model_file import checked_path, staged, write
from sparsebit.errors import BudgetError, CaptureError, ConfigError
from sparsebit.execution.batches import as_call, batches_of, calls
from sparsebit.graph.checking.usable_model import require_values
from sparsebit.graph.values.copying import copy_model, uncompiled
from sparsebit.graph.values.inference_mode import ordinary_tensors
from sparsebit.sparse.budgets.group_ratios import (
    config_of_ratios,
    is_made_by,
    wanted_groups,
    weights_before_add,
)
from sparsebit.sparse.budgets.latency_table import Clock
from sparsebit.sparse.budgets.layer_budgets import weights_of
from sparsebit.sparse.budgets.ratio_search import (
    CANDIDATES,
    LEAST_USED,
    RatioChoice,
    RatioOptions,
    candidate_ratios,
    check_budgets,
    group_name,
    measured_costs,
    search_ratios,
)
from sparsebit.sparse.channel_groups import ChannelGroups
from sparsebit.sparse.channels.computed_weights import folded_copy
from sparsebit.sparse.channels.groups import Unit, layers_of
from sparsebit.sparse.channels.parametrized_weights import folded_layers
from sparsebit.sparse.channels.run_state import forget_run_state
from sparsebit.sparse.config_checks import maskable_weights
from sparsebit.sparse.example_guess import guessed_example
from sparsebit.sparse.group_search import find_groups
from sparsebit.sparse.proof.comparing import compare
from sparsebit.sparse.reconstruction import LayerFit, fit_layers
from sparsebit.sparse.scoring.criteria import criterion
from sparsebit.sparse.scoring.evidence import Loss, gather_evidence
from sparsebit.sparse.selecting.element_weights import (
    Zeros,
    count_zeros,
    find_element_weights,
    left_alone,
    select_elements,
    with_ratios,
)
from sparsebit.sparse.selecting.residual_blocks import (
    ResidualBlocks,
    find_residual_blocks,
    mask_blocks,
    select_blocks,
)
from sparsebit.sparse.selecting.unit_selection import dead_units, mask_units, rounded, select_units, unit_scores
from sparsebit.sparse.selecting.weight_masks import MaskedModule, WeightMasks
from sparsebit.sparse.shrinking.surgery import ChannelPlan, apply_plan
from sparsebit.sparse.sparse_config import BLOCKS, SparseConfig, parse_sconfig
from sparsebit.sparse.sparsers import SPARSERS, Sparser, sparser_mask

log = logging.getLogger(__name__)


class _Given(tuple[nn.Module]):
    """The user's model, which is never changed: copies of a SparseModel share it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Given:
        return self


class SparseModel(MaskedModule):
    """A copy of a model whose pruned weights are zero and stay zero.

    `config`: as for `parse_sconfig`. `example_inputs`: a batch, used to find channels; without one it is
    guessed from the first layer. The copy is `model`: an instance of the user's own class with a mask (a buffer) for
    every weight that may be pruned. Masks are active in every forward of `model` and of its layers, in `state_dict()`
    and in copies; gradients of pruned weights are zero. Weights that a layer computes (weight norm, spectral norm) are
    plain weights in the copy, with their current values.
    """

    @ordinary_tensors()
    def __init__(self, model: nn.Module, config: Source | SparseConfig, example_inputs: Any = None) -> None:
        super().__init__()
        self.config = parse_sconfig(config)
        require_values(model)
        self.model = copy_model(uncompiled(model)).to(self.config.DEVICE)
        self._folded = folded_layers(self.model, self.config)
        if self._folded:  # part of the plan, so that `load` repeats it on the original class
            apply_plan(self.model, ChannelPlan(computed=self._folded))
        self._elements = find_element_weights(self.model)
        self._left_alone: dict[str, str] = {}
        # In a tuple, so that torch does not register the user's model as a submodule of this one.
        self._given = _Given((model,))
        self.example_inputs = example_inputs
        self._before_add: frozenset[str] = frozenset()
        self._ratios: dict[str, float] = {}
        self._round_to = 1  # `choose_ratios` sets it; `calc_params` and `shrink` then round to it too
        self.register_buffer("steps_done", torch.zeros((), dtype=torch.long))
        names = maskable_weights(self.model, self.config, self._elements, lambda: self.groups, lambda: self.blocks)
        self._weights = WeightMasks(self.model, names)

    # What is found

    @cached_property
    def groups(self) -> ChannelGroups:
        """The channel groups, found (and proved) on first access. Printing it shows the report."""
        return find_groups(self.model, self.example_batch)

    @cached_property
    def blocks(self) -> ResidualBlocks:
        """The residual blocks that `GRANULARITY: residual_block` removes, found (and proved) on first access."""
        return find_residual_blocks(self.model, self.example_batch)

    @property
    def example_batch(self) -> Any:
        """The batch used to find channels: the one that was given, or a guess."""
        if self.example_inputs is None:
            self.example_inputs = guessed_example(self.model)
        return self.example_inputs

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters; the config's device if it has none."""
        return next((p.device for p in self.model.parameters()), torch.device(self.config.DEVICE))

    @property
    def zeros(self) -> Zeros:
        """How many weights the masks set to zero, and which are not pruned and why. Printing it shows the report.

        A weight is a parameter with rows and columns that is not of a norm; biases do not count.
        """
        return count_zeros(self._elements, self.masks, {**self._elements.left_alone, **self._left_alone})

    @property
    def sparsity(self) -> dict[str, float]:
        """The share of zeros that masks put into each weight; 0 for weights that are not pruned."""
        masked = {name: 1 - float(mask.float().mean()) for name, mask in self.masks.items()}
        return {**self.zeros.by_weight, **masked}

    def disable_sparse_before_add(self) -> None:
        """Do not prune layers whose outputs are added to others: the channels of residual streams."""
        if self.config.SPARSER.is_of_blocks:
            hint = "name the blocks that are to stay in SPARE"
            raise ConfigError(f"disable_sparse_before_add: with SPARSER.GRANULARITY={BLOCKS}, {hint}")
        self._before_add = weights_before_add(self.groups)

    def prepare_calibration(self) -> None:
        """Does nothing: scripts of the first Sparsebit call it. `calc_params` takes the batches."""

    # Masks

    @ordinary_tensors()
    def calc_params(self, batches: Iterable[Any] | None = None, loss: Loss | None = None) -> None:
        """Compute the masks of the next step of the schedule (by default the only one), and zero the pruned weights.

        `batches`, `loss`: for criteria that need data: batches of inputs, and (outputs, batch) -> scalar.
        """
        self.apply_masks()
        # An optimizer with momentum may have moved pruned weights since the last step; scores must see them as zeros.
        sparser = self.config.SPARSER
        share = self.config.SCHEDULE.share(int(cast("Tensor", self.steps_done)) + 1)
        if sparser.is_structured or sparser.TYPE == "unstructured":
            rule = criterion(sparser.STRATEGY)
            evidence = gather_evidence(self.model, rule.needs, batches, loss, sparser.STRATEGY)
            if not sparser.is_structured:
                evidence = with_ratios(evidence, self.config, self._elements.layers, share)
            scores = rule.scores(evidence)
            masks = self.masks
            if sparser.is_of_blocks:
                gone = frozenset(self.removed_blocks())
                mask_blocks(masks, select_blocks(self.blocks.blocks, scores, self.config, share, gone))
            elif sparser.is_structured:
                mask_units(masks, self._chosen_units(scores, share))
            else:
                masks |= self._element_masks(scores, share)
            self._weights.write(masks)
            if rule.update is not None:
                for name, mask in masks.items():
                    self._weights.write_weight(name, rule.update(evidence[name], mask))
        else:
            kind = cast("type[Sparser]", SPARSERS.get(sparser.TYPE))
            for name, ratio in self._element_ratios().items():
                weight = self.model.get_parameter(name).detach()
                self._weights.write({name: sparser_mask(kind, self.config, name, weight, share * ratio)})
        cast("Tensor", self.steps_done).add_(1)
        self.apply_masks()
        if not sparser.is_structured:
            zeros = self.zeros
            log.log(logging.WARNING if zeros.left_alone else logging.INFO, "%s", zeros)
        # Values that a forward has cached come from the weights before this step. `vars`: only if groups were searched.
        if "groups" in vars(self):
            forget_run_state(self.model, self.groups.bench.model)

    def rewind(self, state: Mapping[str, Tensor]) -> None:
        """Load weights of an earlier time (a state_dict of the original model) and keep the masks."""
        if self._folded:  # the user's state holds the parameters from which those layers compute their weights
            given = copy_model(uncompiled(self._given[0]))
            given.load_state_dict(dict(state))
            state = folded_copy(given, self._folded).state_dict()
        own = self.model.state_dict()
        if missing := sorted(set(state) - set(own)):
            raise ConfigError(f"rewind: the state has {missing[0]}, which the model does not have")
        self.model.load_state_dict(dict(state), strict=False)
        self.apply_masks()

    def _chosen_units(self, scores: Mapping[str, Tensor], share: float) -> list[Unit]:
        groups = wanted_groups(self.groups, self.config)
        own = {group_name(group): self.config.ratio_of(layers_of(group)) for group in groups} | self._ratios
        ratios = [0.0 if is_made_by(group, self._before_add) else own[group_name(group)] for group in groups]
        gone = frozenset(unit.label for unit in self.dead_units())
        units = select_units(groups, ratios, scores, self.config, share, gone)
        return rounded(groups, units, self.groups.bench.sizes, self._round_to)

    def choose_ratios(
        self,
        budgets: Mapping[str, float],
        batches: Iterable[Any],
        *,
        candidates: Sequence[float] = CANDIDATES,
        loss: Loss | None = None,
        round_to: int | Sequence[int] = 1,
        num_threads: int = 1,
        stopwatch: Stopwatch | None = None,
    ) -> RatioChoice:
        """Choose the ratio of each group so that the smaller model keeps the budgets; `calc_params` then uses them.

        `budgets`: `{"macs": 0.7}`, of `macs`, `bytes`, `latency`; up to 1 it is a share of the dense model, above 1 a
        number (of MACs for one sample). `batches`: the cost of an option is the change of the model's output on the
        first 32 samples. Groups that `SPARE` or `SPECIFIC` name keep the config's ratio. The sizes are
        those of the smaller model, counted.

        `round_to`: widths stay multiples of this where they were. If several are given, as `(16, 8, 1)`, the first that
        keeps the budgets and uses at least three quarters of one is taken, and the choice names it. `calc_params` and
        `shrink` then round to it too.

        `latency`: the time of one sample in ONNX Runtime on this machine, with `num_threads`, as a share of the dense
        float file's. Layers are timed at several widths; the smaller model is exported and timed, and chosen anew until
        it is within 5 % of the budget. `stopwatch`: the timer, replaced in tests.
        """
        check_budgets(budgets)
        listed = list(batches_of(batches))
        options = self.ratio_options(listed, candidates=candidates, loss=loss)
        model, plan = self.masked_model().eval(), self.groups.plan
        clock = partial(Clock, model, next(iter(calls(listed, model, self.device))), plan, num_threads, stopwatch)
        search = partial(search_ratios, model, budgets=budgets, plan=plan, example=self.example_batch, clock=clock)
        *coarser, finest = (round_to,) if isinstance(round_to, int) else round_to
        choice = None
        for width in coarser:
            # A coarse multiple may not reach the budget; then the next finer one is tried. The finest one raises.
            with contextlib.suppress(BudgetError):
                found = search(replace(options, round_to=width))
                if found.is_in_time and found.used(budgets) >= LEAST_USED:
                    choice = found
                    break
        choice = choice or search(replace(options, round_to=finest))
        self._ratios, self._round_to = dict(choice.ratios), choice.round_to
        return choice

    def ratio_options(
        self,
        batches: Iterable[Any],
        *,
        candidates: Sequence[float] = CANDIDATES,
        loss: Loss | None = None,
        round_to: int = 1,
    ) -> RatioOptions:
        """The cost of each ratio of each group, measured on the batches: the options of `choose_ratios`."""
        sparser = self.config.SPARSER
        if not sparser.is_structured or sparser.SCOPE == "global" or sparser.is_of_blocks:
            given = f"TYPE={sparser.TYPE}, SCOPE={sparser.SCOPE}, GRANULARITY={sparser.GRANULARITY}"
            allowed = "TYPE: structured, SCOPE: layer and a GRANULARITY of channels, heads or neurons"
            raise ConfigError(f"choose_ratios: SPARSER has {given}; set {allowed}")
        listed = list(batches_of(batches))
        rule = criterion(sparser.STRATEGY)
        scores = rule.scores(gather_evidence(self.model, rule.needs, listed, loss, sparser.STRATEGY))
        groups = {group_name(group): group for group in wanted_groups(self.groups, self.config)}
        unit = {name: unit_scores(group, scores, sparser.STRATEGY) for name, group in groups.items()}
        ratios = {
            name: [0.0] if is_made_by(group, self._before_add) else candidate_ratios(group, self.config, candidates)
            for name, group in groups.items()
        }
        model, inputs = self.masked_model().eval(), list(calls(listed, self.model, self.device))
        costs = measured_costs(model, groups, unit, ratios, inputs)
        weights = weights_of(model, groups, inputs[0])
        return RatioOptions(groups, ratios, costs, unit, weights, self.groups.bench.sizes, round_to)

    def config_of(self, ratios: Mapping[str, float]) -> SparseConfig:
        """The config that sets the ratio of each group (`RatioChoice.ratios`), by the names of its layers."""
        layers = {group_name(group): layers_of(group) for group in wanted_groups(self.groups, self.config)}
        return config_of_ratios(self.config, {name: layers[name] for name in ratios}, ratios)

    def _element_ratios(self) -> dict[str, float]:
        """The config's ratio for each weight that single elements are pruned from."""
        return {
            name: 0.0 if name in self._before_add else self.config.ratio_of(self._elements.layers[name])
            for name in self._elements.pruned
        }

    def _element_masks(self, scores: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
        masks, ratios = self.masks, self._element_ratios()
        self._left_alone = left_alone(scores, masks, ratios, self.config)
        ratios |= dict.fromkeys(self._left_alone, 0.0)
        return select_elements(scores, masks, self._elements.layers, ratios, self.config, share)

    # After pruning

    def reconstruct(
        self, batches: Iterable[Any], teacher: nn.Module | None = None, *, max_rows: int = 32768
    ) -> dict[str, LayerFit]:
        """Fit the remaining weights, layer by layer, to the outputs of the dense model; returns the gain of each layer.

        `batches`: a few hundred inputs, without labels. `teacher`: the dense model, by default the original one. Call
        it after `calc_params` and before training: the weights are fitted anew from the dense ones, in closed form.
        `max_rows`: about so many positions of a layer's input are read; fewer are faster.
        """
        dense = folded_copy(uncompiled(self._given[0] if teacher is None else teacher), self._folded)
        self.apply_masks()
        found = fit_layers(self.model, dense, self.masks, batches, max_rows=max_rows)
        self.apply_masks()
        if found:
            before, after = (fmean(getattr(fit, kind) for fit in found.values()) for kind in ("before", "after"))
            log.info("reconstruction: %d layers, mean error %.3g -> %.3g", len(found), before, after)
        return found

    def dead_units(self) -> list[Unit]:
        """The units all of whose weights are masked."""
        return dead_units(self.groups.units, self.masks)

    def removed_blocks(self) -> list[str]:
        """The names of the residual blocks all of whose weights are masked."""
        masks = self.masks
        blocks = self.blocks.blocks if self.config.SPARSER.is_of_blocks else ()
        return [block.name for block in blocks if not any(bool(masks[name].any()) for name in block.parameters)]

    def shrink(self, round_to: int | None = None) -> nn.Module:
        """A plain, smaller model of the user's own class, equal to this one.

        Channels that are masked as a whole are removed; a residual block becomes a module that returns its input.
        `round_to`: some masked channels stay (as zeros), so that every width that was a multiple of it is one again,
        which makes kernels fast; default: the one of `choose_ratios`, which leaves no zeros, and 1 without it.
        """
        sparser = self.config.SPARSER
        if not sparser.is_structured:
            raise ConfigError(f"shrink: SPARSER.TYPE={sparser.TYPE} masks single weights; set TYPE: structured")
        if sparser.is_of_blocks:
            small, names = self.masked_model(), self.removed_blocks()
            norms = {block.name: block.norms for block in self.blocks.blocks if block.norms and block.name in names}
            plan = ChannelPlan(skipped=tuple(names), norms=norms)
        else:
            groups, bench = self.groups, self.groups.bench
            dead = rounded(groups.groups, self.dead_units(), bench.sizes, round_to or self._round_to)
            # Each group was proved on random draws of its units. This choice of units is proved once more.
            if failure := compare(bench, dead):
                raise CaptureError(
                    f"shrink: the smaller model is not the masked one: {failure.reason}; SPARE these layers"
                )
            small, plan = self.masked_model(), groups.plan(dead)
            forget_run_state(small, bench.model)
        apply_plan(small, plan)
        return small

    def export_onnx(
        self,
        dummy_data: Any,
        name: str | os.PathLike[str],
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        dynamic_axes: DynamicAxes | None = None,
        opset_version: int = 21,
        verbose: bool = False,
        extra_info: bool = False,
    ) -> None:
        """Write the masked model, in float, as an ONNX file; for a smaller model use `shrink` and its own export."""
        if extra_info:
            raise ConfigError("extra_info=True: a masked model is float and has no bit widths to write; leave it out")
        options = OnnxOptions(input_names, output_names, dynamic_axes, opset_version, verbose)
        target, model = checked_path(name), self.masked_model().eval()
        made = to_onnx(model, *as_call(dummy_data, model), options, signature=inspect.signature(model.forward))
        with staged(target) as path:
            write(made, path)
