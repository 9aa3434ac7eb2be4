"""How far two runs of one model are apart: differences, SQNR, top-1; and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparsebit.errors import DeploymentError


@dataclass(frozen=True)
class Tolerance:
    """What a file may differ from its simulation.

    Both round; where a float op in between decides a rounding the other way, the two drift apart until they differ as
    much as quantized and float do. That is allowed: `noise_margin_db` below the SQNR of the simulation against float,
    or `sqnr_db` where that is lower. `top1`: the share of samples with the same largest output, among those that the
    drift cannot decide. `max_difference`: as a share of the output's range; None: no limit of its own. `min_sqnr_db`: a
    limit that no noise lowers; None: none.

    `exact`: True: every output bit by bit; False: within the limits above; None: bit by bit wherever the simulation has
    the runtime's own arithmetic, and within the limits behind float ops. `allow_nan`: NaN on both sides is no fault.
    """

    sqnr_db: float = 35.0
    noise_margin_db: float = 4.0
    top1: float = 0.99
    max_difference: float | None = None
    min_sqnr_db: float | None = None
    exact: bool | None = None
    allow_nan: bool = False


@dataclass(frozen=True)
class OutputParity:
    """One output over all samples. Differences are shares of the expected output's range. `top1`: None without classes.

    `noise_db`: SQNR of the expected values against the float model; None where that is not known. Of whole numbers and
    masks, `top1` is the share that is equal. `num_nan`: values that are NaN on both sides; `num_apart`: values that are
    NaN or infinite on one side only.
    """

    name: str
    max_difference: float
    mean_difference: float
    sqnr_db: float
    top1: float | None
    noise_db: float | None
    num_samples: int
    num_nan: int = 0
    num_apart: int = 0

    @property
    def is_exact(self) -> bool:
        """Equal bit by bit, and numbers everywhere: NaN is equal to nothing."""
        return self.is_equal and not self.num_nan

    @property
    def is_equal(self) -> bool:
        """Like `is_exact`, where a NaN on both sides counts as equal."""
        return self.max_difference == 0 and self.mean_difference == 0 and not self.num_apart

    def fault(self, tolerance: Tolerance, against: str = "the simulation") -> str:
        """What is beyond the tolerance; empty where nothing is."""
        if self.num_apart or not math.isfinite(self.mean_difference):
            return (
                f"output {self.name}: {self.num_apart} values are NaN or infinite in the file or in {against}, "
                "not in both"
            )
        if self.num_nan and not tolerance.allow_nan:
            return (
                f"output {self.name}: {self.num_nan} values are NaN, in {against} too; look at the model and the data "
                "(Tolerance(allow_nan=True) or --allow-nan accepts them)"
            )
        if tolerance.exact and not self.is_equal:
            return (
                f"output {self.name}: differs by up to {self.max_difference:.2g} of its range, and is to be equal "
                "bit by bit"
            )
        if tolerance.min_sqnr_db is not None and not self.sqnr_db >= tolerance.min_sqnr_db:
            return (
                f"output {self.name}: SQNR {self.sqnr_db:.1f} dB against {against}; "
                f"{tolerance.min_sqnr_db:.1f} dB is asked for"
            )
        noise_db = math.inf if self.noise_db is None else self.noise_db
        limit = min(tolerance.sqnr_db, noise_db - tolerance.noise_margin_db)
        if self.sqnr_db < limit:
            return f"output {self.name}: SQNR {self.sqnr_db:.1f} dB against {against}; {limit:.1f} dB is needed"
        # One sample is never enough to judge.
        if self.top1 is not None and self.top1 < min(tolerance.top1, 1 - 1 / max(self.num_samples, 1)):
            return f"output {self.name}: top-1 agrees on {self.top1:.1%} of the samples; {tolerance.top1:.1%} is needed"
        if tolerance.max_difference is not None and self.max_difference > tolerance.max_difference:
            return (
                f"output {self.name}: differs by {self.max_difference:.2g} of its range; "
                f"{tolerance.max_difference:.2g} is allowed"
            )
        return ""


@dataclass(frozen=True)
class Parity:
    """A file's outputs in `runtime` against what was expected (`against`: in words)."""

    file: str
    runtime: str
    against: str
    outputs: tuple[OutputParity, ...]

    @property
    def is_exact(self) -> bool:
        return all(output.is_exact for output in self.outputs)

    @property
    def worst(self) -> OutputParity:
        return min(self.outputs, key=lambda output: output.sqnr_db)

    def fault(self, tolerance: Tolerance) -> str:
        return "; ".join(filter(None, (output.fault(tolerance, self.against) for output in self.outputs)))

    def to_dict(self) -> dict[str, Any]:
        return {"file": self.file, "runtime": self.runtime, "against": self.against, "is_exact": self.is_exact} | {
            "outputs": [asdict(output) for output in self.outputs]
        }

    def __str__(self) -> str:
        worst = self.worst
        if self.is_exact:
            return f"bit-exact in {self.runtime} against {self.against}, on {worst.num_samples} samples"
        nan = sum(output.num_nan for output in self.outputs)
        apart = sum(output.num_apart for output in self.outputs)
        told = f", {nan} values NaN in both" if nan else ""
        told += f", {apart} values NaN or infinite in one of the two" if apart else ""
        top1 = "" if worst.top1 is None else f", top-1 agrees on {worst.top1:.1%}"
        return (
            f"{self.runtime} against {self.against}: at most {worst.max_difference:.2g} of the output range, "
            f"mean {worst.mean_difference:.2g}, SQNR {worst.sqnr_db:.1f} dB{top1}{told}, on {worst.num_samples} samples"
        )


class Comparison:
    """Gathers batch after batch in constant memory.

    `judge_all`: top-1 over every sample, also where the two best scores are nearer than what the drift moves them.
    """

    def __init__(self, names: Sequence[str], *, judge_all: bool = False) -> None:
        self.names = list(names)
        self.parts = [_Output(name, judge_all) for name in names]

    def add(self, expected: Sequence[Any], found: Sequence[Any], reference: Sequence[Any] | None = None) -> None:
        """One batch of numpy arrays per output; `reference`: the float model's."""
        if not len(expected) == len(found) == len(self.parts):
            raise DeploymentError(
                f"the file gives {len(found)} outputs ({', '.join(self.names)}), the model {len(expected)}"
            )
        for index, part in enumerate(self.parts):
            part.add(expected[index], found[index], None if reference is None else reference[index])

    def result(self, file: str, runtime: str, against: str) -> Parity:
        if not any(part.count for part in self.parts):
            raise DeploymentError("nothing was compared: the data gave no batch, or the model only empty outputs")
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
        import numpy

        if expected.shape != found.shape:
            raise DeploymentError(
                f"output {self.name}: shape {found.shape} in the file, where {expected.shape} is expected"
            )
        if expected.size == 0:
            return
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
        self.count += expected.size
        self.num_samples += expected.shape[0] if expected.ndim else 1
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
        """Indices and masks are right or wrong; how far 3 is from 900 says nothing."""
        is_same = expected == found
        self.count += expected.size
        self.num_samples += expected.shape[0] if expected.ndim else 1
        self.num_judged += expected.size
        self.num_same += int(is_same.sum())
        self.total += float(expected.size - is_same.sum())
        self.largest = max(self.largest, float(not is_same.all()))

    def _judge(self, expected: Any, found: Any, difference: Any) -> None:
        """Top-1, where the two best scores are further apart than what the drift moves them."""
        import numpy

        best = numpy.sort(expected, axis=1)[:, -2:]
        is_same = expected.argmax(1) == found.argmax(1)
        is_clear = best[:, 1] - best[:, 0] > 2 * difference.mean()
        judged = is_clear | is_same | self.judge_all
        self.num_judged += int(judged.sum())
        self.num_same += int((is_same & judged).sum())

    def result(self) -> OutputParity:
        spread = self.high - self.low
        spread = spread if math.isfinite(spread) and spread > 0 else 1.0
        return OutputParity(
            self.name,
            self.largest / spread,
            self.total / self.count / spread,
            -math.inf if self.num_apart else decibels(self.signal, self.noise),
            (self.num_same / self.num_judged if self.num_judged else 1.0) if self.has_classes else None,
            decibels(self.float_signal, self.float_noise) if self.has_reference else None,
            self.num_samples,
            self.num_nan,
            self.num_apart,
        )


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise); no noise is infinity."""
    if noise == 0:
        return math.inf
    if math.isinf(noise):
        return -math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
