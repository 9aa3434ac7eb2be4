"""`equalize`: cross-layer equalization; each channel gets equally large weights in the layers before and after it.

With one scale per tensor, a channel with small weights has few codes. The formulas are in `equalization_math.py`, the
pairs of layers in `channel_pairs.py`, applying and checking factors in `channel_pairs_scaling.py`. This file finds the
factors by rounds over all pairs, since neighbouring pairs share layers, and moves constant parts of activations into
the next layer's bias.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from sparsebit.execution.blocks.value_store import MIB
from sparsebit.numerics.layer_channels import along_inputs, output_sizes
from sparsebit.quantization.algorithms.registration import register_algorithm
from sparsebit.quantization.algorithms.rescaling.channel_pairs import ChannelPair
from sparsebit.quantization.algorithms.rescaling.channel_pairs_limits import ScaleLimits, SeenValues
from sparsebit.quantization.algorithms.rescaling.channel_pairs_scaling import Factors, FloatRuns, float_runs
from sparsebit.quantization.algorithms.rescaling.equalization_math import absorbed_bias, equalizing_scale, precision
from sparsebit.quantization.model.quant_model import QuantModel

log = logging.getLogger(__name__)

_ENOUGH_VALUES = 32  # per channel: fewer do not show how low the values of other samples will be


@dataclass(frozen=True)
class Equalized:
    """The result for one source of channels and the layers that read them.

    `num_scaled` of `num_channels` channels have another scale now, by at most a factor of `largest`. `before`, `after`:
    how much of the ranges of both sides' weights the channels use (1: all are equally large).
    `absorbed`: the largest bias that the readers took over. `reason`: why some channels, or all, are unchanged.
    """

    readers: tuple[str, ...]
    num_channels: int
    num_scaled: int
    largest: float
    before: float
    after: float
    absorbed: float
    reason: str


@register_algorithm("equalize")
def equalize(
    qmodel: QuantModel,
    data: Any = None,
    *,
    iterations: Annotated[int, Field(ge=1)] = 20,
    largest_scale: Annotated[float, Field(gt=1)] = 1000.0,
    absorb_bias: bool = True,
    asym: bool = False,
    memory_budget: int = 1024 * MIB,
) -> dict[str, Equalized]:
    """Equalize the weights of a calibrated model across layers, in place, on `data` (batches as for calibration).

    For linear layers and convolutions of every kind, including depthwise ones, with only channel-wise, positively
    homogeneous ops between them (ReLU, pooling, reshapes, ...). If a ReLU6 is between, channels that it clips on the
    data keep their scale, and the scales of the others are limited so that it clips none of them. The float model's
    function stays the same, which is checked on the data. Ranges are calibrated again, on the same data. Returns the
    result for each source of channels, by the layer's name; unchanged sources have the reason.

    `data`: None if only weights are quantized; then nothing is known about a ReLU6, and no pair crosses it.
    `iterations`: the largest number of rounds over all pairs; rounds end when no scale changes any more.
    `largest_scale`: the largest factor by which a channel may be scaled. `absorb_bias`: move the part of a channel's
    values that is always present into the bias of the layers that read it. `asym`: as for `calc_qparams`, for the
    calibration afterwards. `memory_budget`: bytes of values kept in memory.

    >>> equalize(qmodel, batches)  # doctest: +SKIP
    {'conv1': Equalized(readers=('conv2',), num_channels=32, num_scaled=32, ...), ...}
    """
    with float_runs(qmodel, data, verb="equalize", asym=asym, memory_budget=memory_budget) as runs:
        pairs = [pair for pair in runs.pairs() if pair.layer is not None]
        absorbs = [pair for pair in pairs if absorb_bias and runs.has_data and _can_absorb(pair)]
        clipped, seen = SeenValues(pairs, readers_of=()), SeenValues((), readers_of=absorbs)
        runs.observe(clipped, seen)
        limits = {pair.name: clipped.limits(pair, has_data=runs.has_data) for pair in pairs}
        active = [pair for pair in pairs if bool(limits[pair.name].is_free.any())]
        before = {pair.name: _used(pair) for pair in pairs}
        factors = _converged(runs, active, limits, iterations, largest_scale)
        absorbed: dict[str, float] = {}

        def absorb(chosen: Sequence[ChannelPair]) -> None:
            nonlocal absorbed
            absorbed = _absorb(runs, [pair for pair in chosen if pair in absorbs], factors, seen)

        refused = runs.apply_best(active, factors, asym=asym, then=absorb)
        found = {}
        for pair in pairs:
            name, why = pair.name, refused.get(pair.name, "")
            factor = None if why else factors.get(name)
            found[name] = _result(pair, factor, before[name], absorbed.get(name, 0.0), limits[name].reason, why)
    log.info("equalization: %d of %d sources of channels", sum(e.num_scaled > 0 for e in found.values()), len(found))
    for name, result in found.items():
        if result.reason:
            held = result.num_channels - result.num_scaled
            log.info("%s: %d of %d channels keep their scale: %s", name, held, result.num_channels, result.reason)
    return found


def _result(pair: ChannelPair, factor: Tensor | None, before: float, absorbed: float, *reasons: str) -> Equalized:
    """`factor`: that of each channel; None if the pair is unchanged."""
    if factor is None:
        factor = torch.ones(pair.num_channels, dtype=torch.float64)
    readers, num_scaled = tuple(reader.name for reader in pair.readers), int((factor != 1).sum())
    largest, reason = float(torch.maximum(factor, 1 / factor).max()), "; ".join(filter(None, (pair.reason, *reasons)))
    return Equalized(readers, pair.num_channels, num_scaled, largest, before, _used(pair), absorbed, reason)


@torch.no_grad()
def _converged(
    runs: FloatRuns, pairs: list[ChannelPair], limits: dict[str, ScaleLimits], iterations: int, largest: float
) -> Factors:
    """The factor of each pair after rounds over all of them, until no scale changes; the weights are restored."""
    total = {pair.name: torch.ones_like(pair.is_free, dtype=torch.float64) for pair in pairs}
    for _ in range(iterations):
        moved = 0.0
        for pair in pairs:
            made, read = _sizes(pair)
            limit, past = limits[pair.name], total[pair.name]
            wanted = (past * equalizing_scale(made, read).to(past)).clamp(1 / largest, largest)
            wanted = torch.maximum(wanted, limit.smallest.to(past))
            wanted = torch.where(limit.is_free.to(past.device), wanted, torch.ones_like(wanted))
            step = wanted / past
            runs.apply([pair], {pair.name: step})
            total[pair.name] = wanted
            moved = max(moved, float(step.log().abs().max()))
        if moved < 1e-3:
            break
    runs.restore()
    return total


def _sizes(pair: ChannelPair) -> tuple[Tensor, Tensor]:
    """The largest weight of each channel at its source, and at its readers, `(channels,)` float64."""
    assert pair.layer is not None
    return output_sizes(pair.layer).double(), pair.read_sizes


def _used(pair: ChannelPair) -> float:
    return precision(*_sizes(pair))


def _can_absorb(pair: ChannelPair) -> bool:
    """Whether a constant subtracted from each channel reaches every reader as that constant."""

    # A padded convolution reads zeros next to the constant; a transposed one covers its border less often.
    def takes_constant(layer: nn.Module) -> bool:
        is_padded = isinstance(layer, _ConvNd) and any(layer._reversed_padding_repeated_twice)
        return layer._parameters.get("bias") is not None and not isinstance(layer, _ConvTransposeNd) and not is_padded

    has_bias = pair.layer is not None and pair.layer._parameters.get("bias") is not None
    return has_bias and not pair.clips and pair.only_moves and all(takes_constant(r.layer) for r in pair.readers)


@torch.no_grad()
def _absorb(runs: FloatRuns, pairs: list[ChannelPair], factors: Factors, seen: SeenValues) -> dict[str, float]:
    """Move constant parts into the readers' biases, for all pairs or none; returns each pair's largest constant."""
    found: dict[str, float] = {}
    changed: list[tuple[Tensor, Tensor]] = []

    def store(parameter: Tensor, value: Tensor) -> None:
        runs.remember(parameter)
        changed.append((parameter, parameter.clone()))
        parameter.copy_(value)

    for pair in pairs:
        values = seen.inputs(pair)
        if values is None or pair.layer is None or values.count < _ENOUGH_VALUES:
            continue
        lowest = values.surely_lowest
        constant = absorbed_bias(torch.where(pair.is_free, lowest.nan_to_num(0.0, 0.0, 0.0), torch.zeros_like(lowest)))
        constant = constant / factors[pair.name].to(constant)
        if not bool((constant > 0).any()):
            continue
        bias = pair.layer.get_parameter("bias")
        store(bias, bias.double() - constant)
        for reader in pair.readers:
            weight, taken = reader.layer.get_parameter("weight"), reader.layer.get_parameter("bias")
            inputs = torch.where(reader.channels >= 0, constant[reader.channels.clamp_min(0).long()], 0.0)
            store(taken, taken.double() + (weight.double() * along_inputs(reader.layer, inputs)).flatten(1).sum(1))
        found[pair.name] = float(constant.max())
    # Other samples may be lower than the lowest value seen: a ReLU would then clip what was moved. So compare outputs.
    if changed and (why := runs.changed()) is not None:
        for parameter, before in reversed(changed):
            parameter.copy_(before)
        log.warning("equalize: the absorption of biases is undone: the float output would change: %s", why)
        return {}
    return found
