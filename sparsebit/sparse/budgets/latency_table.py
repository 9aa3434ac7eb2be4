"""Measures how long a model's layers take in ONNX Runtime at several widths, as the basis of a latency budget.

The model is exported unpruned and with all groups pruned alike, at a few ratios, and the fused regions of these files
are timed in turns. A layer's time is then a function of the remaining share of its multiplications, linear between
the measured points. The time of ops without a weight (additions, norms, layout changes) is spread over the groups by
the size of their activations.
"""

from __future__ import annotations

import ast
import bisect
import inspect
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from sparsebit.deploy.audit.file_latency import Stopwatch, Timed
from sparsebit.deploy.audit.region_times import RegionTimes
from sparsebit.deploy.exporting.to_onnx import flat_inputs, in_order, to_onnx
from sparsebit.deploy.sessions.runtime_sessions import require_runtime
from sparsebit.errors import DeploymentError
from sparsebit.execution.batches import Call, to_device
from sparsebit.execution.sample_rows import find_sample_rows
from sparsebit.graph.values.copying import copy_model
from sparsebit.sparse.channels.groups import Unit
from sparsebit.sparse.shrinking.surgery import ChannelPlan, apply_plan

RUNTIME = "onnxruntime"
TOLERANCE = 0.05
POINTS = (0.25, 0.5, 0.75)  # ratios at which all groups are pruned alike and timed
_SECONDS = 3.0
_SCOPES = "pkg.torch.onnx.name_scopes"
_ROOT = "module"  # the model's name inside the exported call
_LARGEST = 1 << 30  # bytes: files are kept in memory
_DENSE = "dense"

# (remaining share of the multiplications, milliseconds), from less to more.
Curve = tuple[tuple[float, float], ...]
MakePlan = Callable[[list[Unit]], ChannelPlan]


@dataclass(frozen=True)
class LatencyShare:
    """The time of the smaller model in the runtime, as a share of the dense one's, both as float files.

    `asked`: the budget. `ratio`: as measured. `predicted`: by the sum of measured regions. `tries`: how many smaller
    models were exported and timed. `reason`: why `ratio` is more than 5 % from `asked`; empty if it is not.
    """

    asked: float
    ratio: float
    predicted: float
    tries: int
    reason: str = ""

    @property
    def is_near(self) -> bool:
        return abs(self.ratio / self.asked - 1) <= TOLERANCE

    def __str__(self) -> str:
        text = f"latency: {self.ratio:.3f} of the dense model's, {self.asked:.3f} asked, {self.predicted:.3f} predicted"
        return f"{text} ({self.reason})" if self.reason else text


def at_share(curve: Curve, share: float) -> float:
    """Milliseconds at a share, linear between the points; below the first point, towards zero at the same slope.

    >>> at_share(((0.25, 2.0), (1.0, 5.0)), 0.5)
    3.0
    """
    if not curve:
        return 0.0
    place = min(max(1, bisect.bisect_left([x for x, _ in curve], share)), len(curve) - 1)
    (x0, y0), (x1, y1) = (curve[place - 1], curve[place]) if len(curve) > 1 else ((0.0, 0.0), curve[0])
    return max(0.0, y0 + (share - x0) * (y1 - y0) / (x1 - x0) if x1 > x0 else y1)


class Clock:
    """Times the model's files in the runtime: layers at several widths, and smaller models as a whole."""

    def __init__(
        self, model: nn.Module, call: Call, plan: MakePlan, num_threads: int = 1, stopwatch: Stopwatch | None = None
    ) -> None:
        require_runtime(RUNTIME)
        self.model, self.call, self.plan = model, _one_sample(call, model), plan
        arrays = [tensor.detach().cpu().numpy() for tensor in flat_inputs(*self.call)]
        self.watch = stopwatch or Stopwatch(RUNTIME, [arrays], num_threads)
        self.dense = onnx_bytes(model, self.call)
        self.tries = 0

    def times(self, small: nn.Module, seconds: float = _SECONDS) -> tuple[Timed, Timed]:
        """The times of the dense and of a smaller model, measured in turns."""
        self.tries += 1
        name = f"try {self.tries}"
        found = self.watch.ratios({_DENSE: self.dense, name: onnx_bytes(small, self.call)}, seconds)
        return found[_DENSE], found[name]

    def curves(
        self, points: Mapping[float, Sequence[Unit]], shares: Mapping[float, Mapping[str, float]]
    ) -> tuple[dict[str, Curve], Curve]:
        """The time of every weight's layer by the remaining share of it, and the time of the rest by 1 - ratio.

        `points`: the removed units at each ratio. `shares`: the remaining share of each weight at these, and at 0.
        """
        files = {_DENSE: self.dense}
        for ratio, units in points.items():
            small = copy_model(self.model)
            apply_plan(small, self.plan(list(units)))
            files[str(ratio)] = onnx_bytes(small, self.call)
        timed = self.watch.regions(files)
        weights: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        rest: list[tuple[float, float]] = []
        for ratio, name in ((0.0, _DENSE), *((ratio, str(ratio)) for ratio in points)):
            own, others = _by_weight(timed[name], shares[ratio])
            rest.append((1 - ratio, others))
            for weight, ms in own.items():
                weights[weight].append((shares[ratio][weight], ms))
        return {weight: _rising(found) for weight, found in weights.items()}, _rising(rest)


def _by_weight(times: RegionTimes, weights: Container[str]) -> tuple[dict[str, float], float]:
    """Milliseconds of the regions, by the first weight in each; and the total of all others."""
    found: defaultdict[str, float] = defaultdict(float)
    for region in times.regions:
        names = (f"{layer.partition('/')[0]}.weight".removeprefix(".") for layer in region.layers)
        found[next((name for name in names if name in weights), "")] += region.ms
    others = found.pop("", 0.0)
    return found, others


def _rising(points: Iterable[tuple[float, float]]) -> Curve:
    """Sorted by share, with the mean of each share, made non-decreasing: a smaller layer is slower only by noise."""
    found: defaultdict[float, list[float]] = defaultdict(list)
    for share, ms in sorted(points):
        found[share].append(ms)
    means = [statistics.fmean(times) for times in found.values()]
    return tuple(zip(found, itertools.accumulate(means, max), strict=True))


def onnx_bytes(model: nn.Module, call: Call) -> bytes:
    """The model as a float file in memory; every node's name begins with the path of its module and a slash."""
    import onnx_ir as ir

    plain = copy_model(model).cpu().eval()
    found = to_onnx(plain, *call, signature=inspect.signature(plain.forward))
    sizes = (value.const_value.nbytes for value in found.graph.initializers.values() if value.const_value is not None)
    if (size := sum(sizes)) > _LARGEST:
        raise DeploymentError(
            f"budget latency: the float file would have {size / 1e9:.1f} GB, and files are kept in memory (at most "
            f"{_LARGEST / 1e9:.1f} GB); give a budget of macs"
        )
    for place, node in enumerate(found.graph):
        scopes = node.metadata_props.get(_SCOPES)
        paths = [path for path in ast.literal_eval(scopes)[:-1] if path.split(".")[0] == _ROOT] if scopes else []
        node.name = f"{paths[-1].removeprefix(_ROOT).removeprefix('.') if paths else ''}/{node.name or place}"
    return bytes(ir.to_proto(found).SerializeToString())


def _one_sample(call: Call, model: nn.Module) -> Call:
    """The first sample of a batch: latency is measured with one sample."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return copy_model(model).eval()(*args, **kwargs)

    args, kwargs = find_sample_rows(call, run).of(call, [0])
    return to_device(args, "cpu"), in_order(to_device(kwargs, "cpu"), inspect.signature(model.forward))
