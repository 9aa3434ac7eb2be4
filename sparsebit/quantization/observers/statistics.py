"""Streaming statistics over rows `(R, n)`, one row per scale: constant memory, and parts that merge to the whole.

Every statistic has `update(rows)`, `merge(other)`, `state()`, `load_state(state)` and `is_empty`, and is on the
device of its data. A row's values may come in any number of updates; the first update fixes the number of rows.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import Self

from sparsebit.errors import CalibrationError

State = dict[str, Tensor]


class Statistic(Protocol):
    """The interface that an observer requires of its statistic."""

    @property
    def is_empty(self) -> bool: ...
    def update(self, rows: Tensor) -> None: ...
    def merge(self, other: Self) -> None: ...
    def state(self) -> State: ...
    def load_state(self, state: State) -> None: ...


class MinMax:
    """The lowest and the highest value of each row: `low` and `high`, float32 `(R,)`."""

    def __init__(self) -> None:
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        return self.low is None

    def update(self, rows: Tensor) -> None:
        self._widen(*extremes(rows))

    def merge(self, other: Self) -> None:
        if other.low is not None and other.high is not None:
            self._widen(other.low, other.high)

    def state(self) -> State:
        return {} if self.low is None or self.high is None else {"low": self.low, "high": self.high}

    def load_state(self, state: State) -> None:
        self.low, self.high = state.get("low"), state.get("high")

    def range(self) -> tuple[Tensor, Tensor]:
        assert self.low is not None and self.high is not None, "an empty statistic has no range"
        return self.low, self.high

    def _widen(self, low: Tensor, high: Tensor) -> None:
        if self.low is None or self.high is None:
            self.low, self.high = low, high
            return
        check_num_rows(self.low, low)
        self.low = torch.minimum(self.low, low.to(self.low.device))
        self.high = torch.maximum(self.high, high.to(self.high.device))


class MovingMinMax:
    """Exponential moving averages of the extremes: `v1 = x1`, `vn = ratio * v + (1 - ratio) * xn`, one step per update.

    Kept as `v = decayed + ratio^steps * first` with `decayed` started at zero, so that "A, then B" merges exactly.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.steps = 0
        self.first: Tensor | None = None  # (2, R): low, high
        self.decayed: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        return self.first is None

    def update(self, rows: Tensor) -> None:
        self._append(torch.stack(extremes(rows)).double(), None, 1)

    def merge(self, other: Self) -> None:
        """The average over this one's updates followed by the other's."""
        if other.first is not None:
            self._append(other.first, other.decayed, other.steps)

    def state(self) -> State:
        if self.first is None or self.decayed is None:
            return {}
        return {"first": self.first, "decayed": self.decayed, "steps": torch.tensor(self.steps)}

    def load_state(self, state: State) -> None:
        self.first, self.decayed = state.get("first"), state.get("decayed")
        self.steps = int(state["steps"]) if state else 0

    def range(self) -> tuple[Tensor, Tensor]:
        assert self.first is not None and self.decayed is not None, "an empty statistic has no range"
        low, high = self.decayed + self.ratio**self.steps * self.first
        return low, high

    def _append(self, first: Tensor, decayed: Tensor | None, steps: int) -> None:
        decayed = (1 - self.ratio) * first if decayed is None else decayed
        if self.first is None or self.decayed is None:
            self.first, self.decayed, self.steps = first, decayed, steps
            return
        check_num_rows(self.first[0], first[0])
        self.decayed = self.ratio**steps * self.decayed + decayed.to(self.decayed.device)
        self.steps += steps


class Samples:
    """The values themselves, `(R, n)`. For weights: they are in memory anyway, and each row has few."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        return self.rows is None

    def update(self, rows: Tensor) -> None:
        check_finite(*extremes(rows))
        if self.rows is not None:
            check_num_rows(self.rows, rows)
            rows = torch.cat([self.rows, rows.to(self.rows)], dim=1)
        self.rows = rows

    def merge(self, other: Self) -> None:
        if other.rows is not None:
            self.update(other.rows)

    def state(self) -> State:
        return {} if self.rows is None else {"rows": self.rows}

    def load_state(self, state: State) -> None:
        self.rows = state.get("rows")


def extremes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest and highest value of each row, float32.

    NaN and infinity raise an error on a CPU. On other devices they show in the result: a check would stall the device.
    """
    # On CPUs two passes beat aminmax: by half on one row, fivefold on many.
    low, high = rows.amin(1).float(), rows.amax(1).float()
    if low.device.type == "cpu":
        check_finite(low, high)
    return low, high


def check_finite(low: Tensor, high: Tensor) -> None:
    """Raise for data with NaN or infinity, judged by its extremes."""
    if torch.compiler.is_compiling():  # a compiled step cannot look at values
        return
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        raise CalibrationError(
            f"values from {float(low.min()):g} to {float(high.max()):g}: NaN or infinity has no range; "
            "check that the float model returns finite values for this input, and look into the calibration data"
        )


def check_num_rows(known: Tensor, given: Tensor) -> None:
    """Raise for data with another number of rows than before."""
    if len(known) != len(given):
        raise CalibrationError(
            f"{len(given)} channels or groups after {len(known)} in an earlier batch: the quantized axis must have the "
            "same length in every batch; set LAYOUT (NCHW or NLC) to match the tensor, or quantize it per tensor"
        )
