"""`Comparison`: the distance between two runs of one model, gathered batch by batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sparsebit.deploy.onnx_graph.packages import numpy
from sparsebit.errors import DeploymentError
from sparsebit.records.parity import OutputParity, Parity, Tolerance

__all__ = ["Comparison", "OutputParity", "Parity", "Tolerance", "decibels"]


class Comparison:
    """Adds up batch after batch in constant memory.

    `judge_all`: top-1 over every sample, also if the two best scores differ by less than the drift.
    """

    def __init__(self, names: Sequence[str], *, judge_all: bool = False) -> None:
        self.names = list(names)
        self.parts = [_Output(name, judge_all) for name in names]

    def add(self, expected: Sequence[Any], found: Sequence[Any], reference: Sequence[Any] | None = None) -> None:
        """One batch of numpy arrays per output; `reference`: the float model's."""
        if not len(expected) == len(found) == len(self.parts):
            shown = f"{len(found)} outputs ({', '.join(self.names)})"
            raise DeploymentError(f"the file has {shown}, the model {len(expected)}")
        for index, part in enumerate(self.parts):
            part.add(expected[index], found[index], None if reference is None else reference[index])

    def result(self, file: str, runtime: str, against: str) -> Parity:
        if not any(part.count for part in self.parts):
            raise DeploymentError("nothing was compared: the data has no batch, or the model only empty outputs")
        return Parity(file, runtime, against, tuple(part.result() for part in self.parts if part.count))


class _Output:
    def __init__(self, name: str, judge_all: bool) -> None:
        self.name, self.judge_all = name, judge_all
        self.count = self.num_samples = self.num_judged = self.num_same = 0
        self.largest = self.total = self.noise = self.signal = self.float_noise = self.float_signal = 0.0
        self.num_nan = self.num_apart = 0
        self.low, self.high = math.inf, -math.inf
        self.has_reference, self.has_classes = False, True

    def add(self, expected: Any, found: Any, reference: Any | None) -> None:
        if expected.shape != found.shape:
            raise DeploymentError(f"output {self.name}: shape {found.shape} in the file, not {expected.shape}")
        if expected.size == 0:
            return
        self.count += expected.size
        self.num_samples += expected.shape[0] if expected.ndim else 1
        if expected.dtype.kind in "iub":
            self._add_discrete(expected, found)
            return
        is_class_scores = expected.ndim == 2 and expected.shape[1] > 1 and expected.dtype.kind == "f"
        expected, found = (numpy.asarray(values).astype(numpy.float64) for values in (expected, found))
        finite = numpy.isfinite(expected)
        nan = numpy.isnan(expected) & numpy.isnan(found)
        comparable = finite & numpy.isfinite(found)
        self.num_nan += int(nan.sum())
        self.num_apart += int((~comparable & ~nan & (expected != found)).sum())
        difference = numpy.zeros_like(expected)
        numpy.subtract(found, expected, where=comparable, out=difference)
        numpy.abs(difference, out=difference)
        self.largest = max(self.largest, float(difference.max()))
        self.total += float(difference.sum())
        self.noise += float(numpy.square(difference).sum())
        self.signal += float(numpy.square(numpy.where(finite, expected, 0.0)).sum())
        if finite.any():
            self.low = min(self.low, float(expected[finite].min()))
            self.high = max(self.high, float(expected[finite].max()))
        if reference is not None:
            original = numpy.where(finite, numpy.asarray(reference).astype(numpy.float64), 0.0)
            self.has_reference = True
            self.float_noise += float(numpy.square(numpy.where(finite, expected, 0.0) - original).sum())
            self.float_signal += float(numpy.square(original).sum())
        self.has_classes = self.has_classes and is_class_scores
        if self.has_classes:
            self._judge(expected, found, difference)

    def _add_discrete(self, expected: Any, found: Any) -> None:
        """Compare indices and masks by equality, because their distances mean nothing."""
        is_same = expected == found
        self.num_judged += expected.size
        self.num_same += int(is_same.sum())
        self.total += float(expected.size - is_same.sum())
        self.largest = max(self.largest, float(not is_same.all()))

    def _judge(self, expected: Any, found: Any, difference: Any) -> None:
        """Top-1 over the samples whose two best scores differ by more than the drift."""
        best = numpy.sort(expected, axis=1)[:, -2:]
        is_same = expected.argmax(1) == found.argmax(1)
        is_clear = best[:, 1] - best[:, 0] > 2 * difference.mean()
        judged = is_clear | is_same | self.judge_all
        self.num_judged += int(judged.sum())
        self.num_same += int((is_same & judged).sum())

    def result(self) -> OutputParity:
        spread = self.high - self.low
        spread = spread if math.isfinite(spread) and spread > 0 else 1.0
        sqnr = -math.inf if self.num_apart else decibels(self.signal, self.noise)
        top1 = (self.num_same / self.num_judged if self.num_judged else 1.0) if self.has_classes else None
        noise = decibels(self.float_signal, self.float_noise) if self.has_reference else None
        differences = self.largest / spread, self.total / self.count / spread
        counts = self.num_samples, self.num_nan, self.num_apart
        return OutputParity(self.name, *differences, sqnr, top1, noise, *counts)


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise); no noise is infinity."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and not math.isinf(noise) else -math.inf
