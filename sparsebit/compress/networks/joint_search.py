"""`choose_channels_and_bits`: chooses channels to remove and bits of weights together, in one integer program.

Each group of channels is an item, and its options are pairs: a ratio, and the bits of the weights that produce these
channels. So layers that write the same channels (a residual stream) have the same bits. A weight whose channels all
stay (the last layer) is an item with its bits only. The cost of an option is the noise of the model's output,
relative to its signal, when only the group is pruned to this ratio and only its weights have these bits; both are
measured. Bytes and bit operations of a weight are a product of its bits and of the remaining shares of its two axes,
so they are pairs of items.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from sparsebit.config.reading import Source
from sparsebit.config.schema import QuantConfig
from sparsebit.execution.batches import batches_of
from sparsebit.numerics.choices.integer_program import Budget, choose
from sparsebit.quantization.mixed_precision.bit_config import with_bits
from sparsebit.quantization.mixed_precision.sensitivity import sensitivity
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.planning.sites import split_site
from sparsebit.quantization.post_training import quantize
from sparsebit.sparse.budgets.layer_budgets import LayerWeight, tables, tightened
from sparsebit.sparse.budgets.ratio_search import CANDIDATES, RatioOptions, check_budgets
from sparsebit.sparse.shrinking.surgery import apply_plan
from sparsebit.sparse.sparse_config import SparseConfig
from sparsebit.sparse.sparse_model import SparseModel

log = logging.getLogger(__name__)

BUDGETS = ("bytes", "bops")
_FLOAT_BITS = 32
_GAP = 1e-3


@dataclass(frozen=True)
class JointChoice:
    """A ratio per group and bits per weight. To rebuild: prune by `sconfig`, shrink, then quantize by `qconfig`.

    `ratios`: of each group. `bits`: of each weight. `cost`: the sum of the noise of all choices. `spent`: the bytes or
    bit operations of the smaller, quantized model as shares of the dense float model's; `limits`: the budgets.
    """

    sconfig: SparseConfig
    qconfig: QuantConfig
    ratios: Mapping[str, float]
    bits: Mapping[str, int]
    cost: float
    spent: Mapping[str, float]
    limits: Mapping[str, float]

    def __str__(self) -> str:
        whole = "of the dense float model's"
        lines = [f"{name}: {self.spent[name]:.4f} {whole}, {limit:g} allowed" for name, limit in self.limits.items()]
        lines += [f"  {ratio:6.3f} of the channels of {name} are removed" for name, ratio in self.ratios.items()]
        return "\n".join([*lines, *(f"  {count:2d} bits  {name}" for name, count in self.bits.items())])


def choose_channels_and_bits(
    model: nn.Module,
    batches: Iterable[Any],
    budgets: Mapping[str, float],
    *,
    sconfig: Source | SparseConfig = "{SPARSER: {TYPE: structured}}",
    qconfig: Source | QuantConfig = "onnxruntime",
    weight_bits: Sequence[int] = (4, 8),
    candidates: Sequence[float] = CANDIDATES,
    round_to: int = 1,
) -> JointChoice:
    """The ratio of each group of channels and the bits of each weight that keep the budgets with the least loss.

    `budgets`: "bytes" of all parameters with the scales of weights, "bops" (products of the bits of a layer's weight
    and input, times its multiplications): shares of the dense float model's. `weight_bits`: the candidates;
    activations have the bits of `qconfig`. `round_to`: as for `shrink`. The model is not changed.

    >>> found = choose_channels_and_bits(model, batches, {"bytes": 0.12})  # doctest: +SKIP
    >>> smodel = SparseModel(model, found.sconfig, batches[0])  # doctest: +SKIP
    >>> smodel.calc_params()  # doctest: +SKIP
    >>> qmodel = sparsebit.quantize(smodel.shrink(), batches, found.qconfig)  # doctest: +SKIP
    """
    check_budgets(budgets, BUDGETS, shares=BUDGETS)
    listed = list(batches_of(batches))
    smodel = SparseModel(model, sconfig, listed[0] if listed else None).eval()
    options = smodel.ratio_options(listed, candidates=candidates, round_to=round_to)
    qmodel = quantize(model, listed, qconfig)
    scores = sensitivity(qmodel, listed, method="sqnr", weight_bits=weight_bits, activation_bits=()).scores
    weights = {weight.name for weight in options.weights}
    noise = {site: row for site, row in scores.items() if site in weights}
    program = _Program(options, noise, _activation_bits(qmodel))
    limits = dict(budgets)
    while True:
        places, cost = program.solve(limits)
        ratios = {name: own[program.ratio_place(name, places)] for name, own in options.ratios.items()}
        bits = {site: program.bits_of(site, places) for site in noise}
        small = smodel.masked_model()
        dead = [unit for name, ratio in ratios.items() for unit in options.dead(name, ratio)]
        apply_plan(small, smodel.groups.plan(dead))
        spent = program.shares(places)
        if "bytes" in budgets:  # counted on the model, including parts outside of the program: buffers, scales
            spent["bytes"] = _num_bytes(small, bits) / _num_bytes(smodel.model, {})
        over = {name: spent[name] / limit for name, limit in budgets.items()}
        if max(over.values()) <= 1:
            break
        limits = tightened(limits, over)
    layers = {split_site(site)[0]: count for site, count in bits.items()}
    changed = with_bits(qmodel.config, qmodel.plan.layers, layers, {})
    return JointChoice(smodel.config_of(ratios), changed, ratios, bits, cost, spent, dict(budgets))


class _Program:
    """Items are groups (options: ratio and bits) and weights without a group (options: bits)."""

    def __init__(
        self, options: RatioOptions, noise: Mapping[str, Mapping[int, float]], activation_bits: Mapping[str, int]
    ) -> None:
        self.weights, self.noise, self.activation_bits = options.weights, noise, activation_bits
        self.counts = {name: [len(units) for units in removed] for name, removed in options.removed.items()}
        writing: dict[str, list[LayerWeight]] = {name: [] for name in options.ratios}
        for weight in self.weights:
            if weight.name in noise and weight.output_group:
                writing[weight.output_group].append(weight)
        self.options: dict[str, list[tuple[int, int]]] = {}  # (place of the ratio, bits)
        self.costs: dict[str, list[float]] = {}
        for name, writers in writing.items():
            # All weights that write these channels get the same bits: those that each of them was measured with.
            allowed = sorted(set.intersection(*(set(noise[w.name]) for w in writers))) if writers else [_FLOAT_BITS]
            self.options[name] = [(place, bits) for place in range(len(options.ratios[name])) for bits in allowed]
            # The rounding noise of a weight shrinks with the channels that are removed from it.
            self.costs[name] = [
                options.costs[name][place]
                + sum(noise[w.name][bits] * (1 - dict(w.axes)[name] * self.counts[name][place]) for w in writers)
                for place, bits in self.options[name]
            ]
        for weight in self.weights:
            if weight.name in noise and not weight.output_group:
                item = _own(weight.name)
                self.options[item] = [(0, bits) for bits in sorted(noise[weight.name])]
                self.costs[item] = [noise[weight.name][bits] for _, bits in self.options[item]]

    def solve(self, limits: Mapping[str, float]) -> tuple[dict[str, int], float]:
        found = choose(self.costs, [self._budget(name, limit) for name, limit in limits.items()], gap=_GAP)
        return dict(found.options), found.cost

    def ratio_place(self, group: str, places: Mapping[str, int]) -> int:
        return self.options[group][places[group]][0]

    def bits_of(self, weight: str, places: Mapping[str, int]) -> int:
        item = self._item(next(one for one in self.weights if one.name == weight))
        return self.options[item][places[item]][1] if item else _FLOAT_BITS

    def shares(self, places: Mapping[str, int]) -> dict[str, float]:
        """Bytes and bit operations of the choice, as shares of the dense float model's."""
        return {
            name: sum(self._with(name, weight, places) for weight in self.weights) / (self._dense(name) or 1.0)
            for name in BUDGETS
        }

    def _item(self, weight: LayerWeight) -> str:
        """The item that decides the bits of a weight; empty if it stays float."""
        return (weight.output_group or _own(weight.name)) if weight.name in self.noise else ""

    def _amount(self, name: str, weight: LayerWeight, share: float, bits: int, *, dense: bool = False) -> float:
        if name == "bytes":
            return weight.bytes * share * bits / _FLOAT_BITS
        others = _FLOAT_BITS if dense else self.activation_bits.get(weight.name, _FLOAT_BITS)
        return weight.macs * share * bits * others

    def _budget(self, name: str, limit: float) -> Budget:
        sizes = {item: len(options) for item, options in self.options.items()}
        single, pairs, fixed = tables(
            self.weights,
            sizes,
            lambda weight: (item for item in (self._item(weight), *(group for group, _ in weight.axes)) if item),
            lambda weight, places: self._with(name, weight, places),
        )
        return Budget(name, limit * self._dense(name) - fixed, single, pairs)

    def _dense(self, name: str) -> float:
        return sum(self._amount(name, weight, 1.0, _FLOAT_BITS, dense=True) for weight in self.weights)

    def _with(self, name: str, weight: LayerWeight, places: Mapping[str, int]) -> float:
        """The amount that a weight uses when its items have these options."""
        counts = {group: self.counts[group][self.options[group][places[group]][0]] for group, _ in weight.axes}
        item = self._item(weight)
        bits = self.options[item][places[item]][1] if item else _FLOAT_BITS
        return self._amount(name, weight, weight.share(counts), bits)


def _own(weight: str) -> str:
    return f"weight {weight}"


def _activation_bits(qmodel: QuantModel) -> dict[str, int]:
    """The bits of each layer's input, by the name of its weight; float inputs are left out."""
    found: dict[str, int] = {}
    for site, entry in qmodel.plan.items():
        if not site.endswith(".weight"):
            found.setdefault(f"{split_site(site)[0]}.weight", entry.spec.bits)
    return found


def _num_bytes(model: nn.Module, bits: Mapping[str, int]) -> float:
    """Bytes of parameters and buffers; a weight with bits is packed, with a float scale per row."""
    total = float(sum(buffer.nbytes for buffer in model.buffers() if buffer.dtype.is_floating_point))
    for name, parameter in model.named_parameters():
        size = parameter.numel()
        total += size * bits[name] / 8 + 4 * parameter.shape[0] if name in bits else parameter.nbytes
    return total
