"""`Parity`: the distance between two runs of one model (differences, SQNR, top-1). `Tolerance`: its limits."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Tolerance:
    """How much the outputs of a file may differ from the simulation.

    File and simulation both round. A float op in between may differ in its last digit and turn one rounding the other
    way; from there both drift apart, at most as far as the quantized model is from float. So the SQNR may be
    `noise_margin_db` below that of the simulation against float, or `sqnr_db` if that is lower. `top1`: the share of
    samples with the same largest output, among those that the drift cannot decide. `max_difference`: as a share of the
    output's range; None: no limit. `min_sqnr_db`: a lower limit regardless of the noise; None: no limit.

    `exact`: True: every output bit by bit; False: within the limits above; None: bit by bit wherever the simulation has
    the runtime's own arithmetic, and within the limits after float ops. `allow_nan`: accept NaN that is on both sides.
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

    `noise_db`: SQNR of the expected values against the float model; None if unknown. For whole numbers and
    masks, `top1` is the share of equal values. `num_nan`: values that are NaN on both sides; `num_apart`: values that
    are NaN or infinite on one side only.
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
        """Whether all outputs are equal bit by bit, without any NaN."""
        return self.is_equal and not self.num_nan

    @property
    def is_equal(self) -> bool:
        """Like `is_exact`, except that a NaN on both sides counts as equal."""
        return self.max_difference == 0 and self.mean_difference == 0 and not self.num_apart

    def fault(self, tolerance: Tolerance, against: str = "the simulation") -> str:
        """The limit that was exceeded; empty if none was."""
        fault = self._fault(tolerance, against)
        return fault and f"output {self.name}: {fault}"

    def _fault(self, tolerance: Tolerance, against: str) -> str:
        sqnr = f"SQNR {self.sqnr_db:.1f} dB against {against}"
        least, largest = tolerance.min_sqnr_db, self.max_difference
        if self.num_apart or not math.isfinite(self.mean_difference):
            return f"{self.num_apart} values are NaN or infinite in the file or in {against}, not in both"
        if self.num_nan and not tolerance.allow_nan:
            advice = "look at the model and the data (Tolerance(allow_nan=True) or --allow-nan accepts them)"
            return f"{self.num_nan} values are NaN, in {against} too; {advice}"
        if tolerance.exact and not self.is_equal:
            return f"differs by up to {largest:.2g} of its range, and must be equal bit by bit"
        if least is not None and not self.sqnr_db >= least:
            return f"{sqnr}; {least:.1f} dB is required"
        noise_db = math.inf if self.noise_db is None else self.noise_db
        limit = min(tolerance.sqnr_db, noise_db - tolerance.noise_margin_db)
        if self.sqnr_db < limit:
            return f"{sqnr}; {limit:.1f} dB is needed"
        # With n samples, one that differs is 1/n: it must not fail the check alone.
        if self.top1 is not None and self.top1 < min(tolerance.top1, 1 - 1 / max(self.num_samples, 1)):
            return f"top-1 agrees on {self.top1:.1%} of the samples; {tolerance.top1:.1%} is needed"
        if tolerance.max_difference is not None and largest > tolerance.max_difference:
            return f"differs by {largest:.2g} of its range; {tolerance.max_difference:.2g} is allowed"
        return ""


@dataclass(frozen=True)
class Parity:
    """How the outputs of a file, run in `runtime`, differ from the expected ones (`against`: a description)."""

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
        facts = {"file": self.file, "runtime": self.runtime, "against": self.against, "is_exact": self.is_exact}
        return {**facts, "outputs": [asdict(output) for output in self.outputs]}

    def __str__(self) -> str:
        worst = self.worst
        if self.is_exact:
            return f"bit-exact in {self.runtime} against {self.against}, on {worst.num_samples} samples"
        nan = sum(output.num_nan for output in self.outputs)
        apart = sum(output.num_apart for output in self.outputs)
        nans = f", {nan} values NaN in both" if nan else ""
        nans += f", {apart} values NaN or infinite in one of the two" if apart else ""
        top1 = "" if worst.top1 is None else f", top-1 agrees on {worst.top1:.1%}"
        return (
            f"{self.runtime} against {self.against}: at most {worst.max_difference:.2g} of the output range, "
            f"mean {worst.mean_difference:.2g}, SQNR {worst.sqnr_db:.1f} dB{top1}{nans}, on {worst.num_samples} samples"
        )


@dataclass(frozen=True)
class ParityCheck:
    """A comparison with its verdict. `fault`: the exceeded limits; None if there are none.

    `data`: a description of the inputs. `first_divergence`: the first site whose integers differ, if searched for.
    """

    parity: Parity
    fault: str | None = None
    data: str | None = None
    first_divergence: str | None = None
