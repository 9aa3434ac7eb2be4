"""`smooth`: activations with a few large channels become easier to quantize, by scaling these channels down.

The arithmetic is in `smoothing_math.py`, the search for layers that share channels in `channel_pairs.py`, applying and
checking factors in `channel_pairs_scaling.py`. For each source, `_Search` tries powers and caps on samples of the
readers' inputs. A scale is folded into the norm or layer that produces the channels. If a residual sum or a GELU reads
or produces them, folding is impossible, and the scale is applied only on request, as a multiplication before the layer.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, fx, nn

from sparsebit.execution.blocks.value_store import MIB, SharedData
from sparsebit.execution.distributed import gather
from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.numerics.layer_channels import along_inputs, largest_by_channel, num_dims
from sparsebit.numerics.rounding.layer_matrix import drawn_positions
from sparsebit.progress import track
from sparsebit.quantization.algorithms.registration import register_algorithm
from sparsebit.quantization.algorithms.rescaling.channel_pairs import ChannelPair, Reader, changeable_layers
from sparsebit.quantization.algorithms.rescaling.channel_pairs_limits import ScaleLimits, SeenValues
from sparsebit.quantization.algorithms.rescaling.channel_pairs_scaling import Factors, FloatRuns, float_runs
from sparsebit.quantization.algorithms.rescaling.smoothing_math import capped_scale, relative_error, smoothing_scale
from sparsebit.quantization.building.inserted_factors import InsertedFactor
from sparsebit.quantization.calibrating.site_changes import insert_factors, remove_factors
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.ops.layer_call import forward_with
from sparsebit.quantization.ops.quant_opr import QIdentity, QShared, WeightedQuantOpr
from sparsebit.quantization.quantizers.base import Quantizer

log = logging.getLogger(__name__)

# At most 0.7: with more, channels that are larger in use than in calibration are clipped.
ALPHAS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
# As a share of the largest channel. MiniLM's first MLP has one that is 4 times the second largest.
CAPS = (1 / 2, 1 / 4, 1 / 8)
_NUM_IMAGES = 8


@dataclass(frozen=True)
class Smoothed:
    """The result for one source of channels and the layers that read them.

    `alpha`: how much of the difficulty moved from activations to weights; None if no power of the channels' sizes was
    used. `cap`: channels larger than this share of the largest are scaled down to it; 1: none. `before`, `after`: the
    squared error of the readers' outputs relative to their energy, with inputs and weights quantized; on the data.
    `is_inserted`: the scale is a separate multiplication. `reason`: why some channels, or all, are unchanged.
    """

    readers: tuple[str, ...]
    num_channels: int
    num_scaled: int
    alpha: float | None
    before: float
    after: float
    is_inserted: bool
    reason: str
    cap: float = 1.0


class _Choice(NamedTuple):
    """How scales are computed: by a power (`alpha`, None: without), then by a cap (1: without)."""

    alpha: float | None = None
    cap: float = 1.0


class _Best(NamedTuple):
    """The best choice for a pair, its factor per channel, and the errors before and after."""

    choice: _Choice
    factors: Tensor
    before: float
    after: float


@register_algorithm("smooth")
def smooth(
    qmodel: QuantModel,
    data: Any,
    *,
    alpha: Annotated[float, Field(ge=0, le=1)] | None = None,
    insert: bool = False,
    num_samples: Annotated[int, Field(ge=1)] = 512,
    largest_scale: Annotated[float, Field(gt=1)] = 1000.0,
    asym: bool = False,
    memory_budget: int = 1024 * MIB,
) -> dict[str, Smoothed]:
    """Smooth the activations of a calibrated model, in place, on `data` (batches as for calibration, no labels).

    Channels are scaled between a norm, a linear layer or a convolution and all the layers that read them: norm to
    q/k/v and to the first linear of an MLP, v to the projection after attention, up to down. The float model's
    function stays the same, which is checked on the data. Ranges are calibrated again, on the same data. Returns the
    result for each source of channels; unchanged sources have the reason.

    `alpha`: from 0 (equal weights) to 1 (equal activations), for all; None searches for each source the one with the
    smallest error of the layers' outputs, then a cap for the few channels that are far larger than all others, and
    leaves the channels unchanged if nothing is better. `insert`: if a scale cannot be folded, multiply before the
    linear layer, provided that this reduces its error by a tenth or more; it costs one elementwise op at run time.
    `num_samples`: rows of activations (a handful of images) that the search uses. `largest_scale`: the largest factor
    by which a channel may be scaled. `asym`: as for `calc_qparams`, for the calibration afterwards. `memory_budget`:
    bytes of values kept in memory.

    >>> smooth(qmodel, batches)  # doctest: +SKIP
    {'blocks.0.norm1': Smoothed(readers=('blocks.0.attn.qkv',), alpha=0.6, ...), ...}
    """
    with float_runs(qmodel, data, verb="smooth", asym=asym, memory_budget=memory_budget) as runs:
        inserted = _insert(qmodel, runs) if insert else []
        found: dict[str, Smoothed] = {}
        try:
            pairs = runs.pairs()
            num_learned = sum(not is_held for _, is_held in runs.judge.pieces)
            samples = _Samples(pairs, num_learned, num_samples, memory_budget)
            found = _smooth(runs, pairs, samples, alpha, largest_scale, {f.name for f in inserted}, asym=asym)
        finally:
            useless = [f.name for f in inserted if f.name not in found or not found[f.name].num_scaled]
            remove_factors(qmodel, useless)
    found = {name: result for name, result in found.items() if not (result.is_inserted and not result.num_scaled)}
    log.info("smoothing: %d of %d sources of channels", sum(s.num_scaled > 0 for s in found.values()), len(found))
    for name, result in found.items():
        log.debug("%s: %s", name, result)
        if result.reason:
            log.info("%s: not all channels are smoothed: %s", name, result.reason)
    return found


def _smooth(
    runs: FloatRuns,
    pairs: Sequence[ChannelPair],
    samples: _Samples,
    alpha: float | None,
    largest: float,
    inserted: set[str],
    *,
    asym: bool,
) -> dict[str, Smoothed]:
    clipped, seen = SeenValues(pairs, readers_of=()), SeenValues((), readers_of=pairs)
    runs.observe(clipped, seen, samples)
    limits = {pair.name: clipped.limits(pair) for pair in pairs}
    factors: Factors = {}
    found: dict[str, _Best] = {}
    for pair in track(pairs, "smoothing"):
        values = seen.inputs(pair)
        if values is None or not bool(limits[pair.name].is_free.any()):
            continue
        search = _Search(runs.root, pair, limits[pair.name], samples)
        found[pair.name] = best = search.best(values.largest, alpha, largest)
        if best.choice != _Choice() and (pair.name not in inserted or best.after < 0.9 * best.before):
            factors[pair.name] = best.factors
    samples.clear()
    refused = runs.apply_best([pair for pair in pairs if pair.name in factors], factors, asym=asym)
    results = {}
    for pair in pairs:
        name, readers = pair.name, tuple(reader.name for reader in pair.readers)
        is_scaled = name in factors and name not in refused
        reason = "; ".join(filter(None, (pair.reason, limits[name].reason, refused.get(name, ""))))
        (choice, factor, before, after) = found.get(name, (_Choice(), None, 0.0, 0.0))
        choice, after = (choice, after) if is_scaled else (_Choice(), before)
        num_scaled = int((factor != 1).sum()) if is_scaled and factor is not None else 0
        results[name] = Smoothed(
            *(readers, pair.num_channels, num_scaled, choice.alpha, before, after, name in inserted, reason, choice.cap)
        )
    return results


# --- the search


class _Samples:
    """A callback for a run of the float model: keeps some of each reader's inputs."""

    def __init__(self, pairs: Sequence[ChannelPair], num_batches: int, num_samples: int, memory_budget: int) -> None:
        self._store = SharedData(device_bytes=memory_budget, host_bytes=memory_budget)
        self._num_batches, self._num_samples = num_batches, num_samples
        self._seen: Counter[fx.Node] = Counter()
        self._parts: dict[tuple[fx.Node, int], list[int]] = {}
        self._wanted: dict[fx.Node, set[int]] = {}  # per node the dimensions of its readers' images
        for reader in (reader for pair in pairs for reader in pair.readers):
            self._wanted.setdefault(reader.node.all_input_nodes[0], set()).add(num_dims(reader.layer))

    def __call__(self, node: fx.Node, value: Any) -> None:
        batch = self._seen[node]
        self._seen[node] += 1
        for dims in self._wanted.get(node, ()):
            wanted = _NUM_IMAGES if dims else self._num_samples
            # Of many batches only some are kept, so that memory does not grow with their number.
            stride = max(self._num_batches // wanted, 1)
            if batch % stride:
                continue
            part = _chosen(value, dims, -(-wanted * stride // self._num_batches))
            if len(part):
                self._store.put((node, dims, batch), part)
                self._parts.setdefault((node, dims), []).append(batch)

    def of(self, reader: Reader) -> tuple[list[Tensor], list[Tensor]]:
        """The reader's kept inputs in two halves: one to find ranges, one to judge them. Images may differ in size."""
        key = reader.node.all_input_nodes[0], num_dims(reader.layer)
        parts = [self._store.get((*key, batch)) for batch in self._parts.get(key, ())]
        if len(parts) == 1 and len(parts[0]) > 1:
            parts = [parts[0][::2], parts[0][1::2]]
        return parts[::2], parts[1::2] or parts

    def clear(self) -> None:
        self._store.clear()


def _chosen(value: Tensor, dims: int, count: int) -> Tensor:
    """About this many images, or rows of a linear layer's input, of one batch: a copy."""
    if dims:
        images = value[None] if value.ndim == dims + 1 else value
        return images[:: max(len(images) // count, 1)][:count].clone()
    rows = value.reshape(-1, value.shape[-1])
    step = max(len(rows) // count, 1)
    # Not every n-th row: that would be the same token of each sentence.
    return rows[drawn_positions(len(rows), step, rows.device)][:count]


class _Search:
    """The best factors of one pair, by the error of its readers' outputs.

    Scales and ranges are found on one half of the samples, and judged on the other: once activations are equalized,
    every channel that is larger in other samples is clipped.
    """

    def __init__(self, root: fx.GraphModule, pair: ChannelPair, limits: ScaleLimits, samples: _Samples) -> None:
        self.pair, self.limits = pair, limits
        self.trials = [_Trial(root, reader, *samples.of(reader)) for reader in pair.readers]

    def best(self, inputs: Tensor, alpha: float | None, largest: float) -> _Best:
        """`inputs`: channels' sizes. `alpha`: a fixed one; None: search.

        The power first; then caps, with the best power and without any: if a single channel is far larger than all
        others, a power that makes it small makes the weights of many others large.
        """
        free, one = self.limits.is_free, torch.ones_like(inputs)
        weights = torch.where(free, self.pair.read_sizes.to(inputs), 0.0)

        def scale_of(sizes: Tensor, choice: _Choice) -> Tensor:
            if choice == _Choice():
                return one
            own = torch.where(free, sizes, 0.0)
            scale = one if choice.alpha is None else smoothing_scale(own, weights, choice.alpha, largest)
            if choice.cap < 1:
                scale = capped_scale(scale, own, choice.cap, largest)
            return torch.where(free, torch.maximum(scale, self.limits.smallest), one)

        sampled = torch.stack([trial.input_sizes(len(inputs)) for trial in self.trials]).amax(0).to(inputs)
        losses: dict[_Choice, float] = {}

        def tried(choices: Iterable[_Choice]) -> _Choice:
            for choice in choices:
                if choice not in losses:
                    losses[choice] = self.loss(scale_of(sampled, choice))
            return min(losses, key=losses.__getitem__)  # the first of equal ones

        before = self.loss(one)
        if alpha is not None:
            found = tried([_Choice(alpha)])
        else:
            found = tried(_Choice(share) for share in (None, *ALPHAS))
            found = tried(_Choice(share, cap) for share in (found.alpha, None) for cap in CAPS)
        return _Best(found, scale_of(inputs, found), before, losses[found])

    def loss(self, scale: Tensor) -> float:
        parts: list[float] = gather(sum(trial.error(scale) for trial in self.trials) / max(len(self.trials), 1))
        return sum(parts) / len(parts)


class _Trial:
    """One reader on its samples: the error of its output when inputs and weight are scaled and quantized."""

    def __init__(self, root: fx.GraphModule, reader: Reader, seen: list[Tensor], judged: list[Tensor]) -> None:
        self.reader, self.seen, self.judged = reader, seen, judged
        wrapper = root.get_submodule(str(reader.node.target))
        self.weight_quantizer = wrapper.weight_quantizer if isinstance(wrapper, WeightedQuantOpr) else None
        self.input_quantizer = _input_quantizer(root, reader.node, wrapper)
        layer = reader.layer
        self.weight, self.bias = layer.get_parameter("weight").detach(), layer._parameters.get("bias")
        with torch.no_grad():
            self.targets = [forward_with(layer, self.weight, self.bias, (x,), {}) for x in judged]

    def input_sizes(self, num_channels: int) -> Tensor:
        """The largest magnitude of each channel in the half that ranges are found on, `(channels,)`."""
        axis = -1 - num_dims(self.reader.layer)
        sizes = torch.stack([x.abs().movedim(axis, 0).flatten(1).amax(1) for x in self.seen]).amax(0)
        return largest_by_channel(sizes.double(), self.reader.channels, num_channels)

    @torch.no_grad()
    def error(self, scale: Tensor) -> float:
        layer = self.reader.layer
        factors = self.reader.factors(scale).to(self.weight)
        scaled = [self.weight * along_inputs(layer, factors)]
        weight = _quantized(self.weight_quantizer, scaled, scaled)[0]
        spread = factors.reshape(-1, *([1] * num_dims(layer)))
        seen, judged = ([x / spread for x in parts] for parts in (self.seen, self.judged))
        inputs = _quantized(self.input_quantizer, seen, judged)
        outputs = [forward_with(layer, weight, self.bias, (x,), {}) for x in inputs]
        pairs = zip(outputs, self.targets, strict=True)
        errors = [relative_error(y, t, per_row=num_dims(layer) == 0) for y, t in pairs]
        return sum(errors) / max(len(errors), 1)


def _input_quantizer(root: fx.GraphModule, node: fx.Node, wrapper: nn.Module) -> Quantizer | None:
    """The quantizer of the layer's input; None if the input stays in float."""
    if isinstance(wrapper, WeightedQuantOpr) and not wrapper.input_quantizer.fake_fused:
        return wrapper.input_quantizer
    front = module_of(node.all_input_nodes[0], root)
    quantizer = front.input_quantizer if isinstance(front, (QIdentity, QShared)) else None
    return None if quantizer is None or quantizer.fake_fused else quantizer


def _quantized(quantizer: Quantizer | None, seen: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """The tensors on a grid like the quantizer's, calibrated on `seen`."""
    if quantizer is None or quantizer.fake_fused:
        return tensors
    own = copy.deepcopy(quantizer)
    own.observer.reset()
    for tensor in seen:
        own.update_observer(tensor)
    own.calc_qparams()
    own.use_quant, own.observing = True, False
    return [own(tensor) for tensor in tensors]


# --- scales that cannot be folded


def _insert(qmodel: QuantModel, runs: FloatRuns) -> list[InsertedFactor]:
    """Insert multiplications by one before the linear layers whose input no norm or layer can scale."""
    root, taken = runs.root, {name for name, _ in runs.root.named_modules()}
    pairs = runs.pairs()
    covered = {reader.node for pair in pairs if bool(pair.is_free.any()) for reader in pair.readers}
    groups: dict[tuple[fx.Node, fx.Node | None], list[fx.Node]] = {}
    for node in changeable_layers(root):
        wrapper = root.get_submodule(str(node.target))
        if node in covered or not isinstance(wrapper, WeightedQuantOpr) or not isinstance(wrapper.op, nn.Linear):
            continue
        (source,) = node.all_input_nodes
        front = module_of(source, root)
        if isinstance(front, QShared) or _input_quantizer(root, node, wrapper) is None:
            continue
        key = (source.all_input_nodes[0], source) if isinstance(front, QIdentity) else (source, None)
        groups.setdefault(key, []).append(node)
    found = []
    for (source, quantizer), layers in groups.items():
        if quantizer is not None and set(quantizer.users) != set(layers):
            continue  # other ops read the same grid
        first: Any = module_of(layers[0], root)
        readers = [quantizer] if quantizer is not None else layers
        wanted = f"smoothing_{layers[0].name}"
        names = itertools.chain([wanted], (f"{wanted}_{number}" for number in itertools.count(1)))
        name = next(name for name in names if name not in taken)
        found.append(InsertedFactor(name, source.name, tuple(n.name for n in readers), (first.op.in_features,)))
    insert_factors(qmodel, found)
    return found
