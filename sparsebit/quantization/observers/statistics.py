"""Streaming statistics over rows `(R, n)`, one row per scale: constant memory, and parts that merge to the whole.

Every statistic has `update(rows)`, `merge(other)`, `state()`, `load_state(state)` and `is_empty`, and is on the
device of its data. A row's values may come in any number of updates; the first update fixes the number of rows.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

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


class NamedTensors:
    """A statistic whose state is the tensors in `NAMES`; all of them are None while it is empty."""

    NAMES: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self.load_state({})

    @property
    def is_empty(self) -> bool:
        return getattr(self, self.NAMES[0]) is None

    def state(self) -> State:
        return {} if self.is_empty else {name: getattr(self, name) for name in self.NAMES}

    def load_state(self, state: State) -> None:
        for name in self.NAMES:
            setattr(self, name, state.get(name))


class MinMax(NamedTensors):
    """The lowest and the highest value of each row: `low` and `high`, float32 `(R,)`."""

    NAMES = ("low", "high")
    low: Any
    high: Any

    def update(self, rows: Tensor) -> None:
        self._widen(*extremes(rows))

    def merge(self, other: Self) -> None:
        if not other.is_empty:
            self._widen(other.low, other.high)

    def range(self) -> tuple[Tensor, Tensor]:
        assert not self.is_empty, "an empty statistic has no range"
        return self.low, self.high

    def _widen(self, low: Tensor, high: Tensor) -> None:
        if not self.is_empty:
            check_num_rows(self.low, low)
            low = torch.minimum(self.low, low.to(self.low.device))
            high = torch.maximum(self.high, high.to(self.high.device))
        self.low, self.high = low, high


class MovingMinMax(NamedTensors):
    """Exponential moving averages of the extremes: `v1 = x1`, `vn = ratio * v + (1 - ratio) * xn`, one step per update.

    Kept as `v = decayed + ratio^steps * first` with `decayed` started at zero, so that "A, then B" merges exactly.
    """

    NAMES = ("first", "decayed")
    first: Any  # (2, R): low, high
    decayed: Any

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio

    def update(self, rows: Tensor) -> None:
        first = torch.stack(extremes(rows)).double()
        self._append(first, (1 - self.ratio) * first, 1)

    def merge(self, other: Self) -> None:
        """The average over this one's updates followed by the other's."""
        if not other.is_empty:
            self._append(other.first, other.decayed, other.steps)

    def state(self) -> State:
        return {} if self.is_empty else {**super().state(), "steps": torch.tensor(self.steps)}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self.steps = int(state["steps"]) if state else 0

    def range(self) -> tuple[Tensor, Tensor]:
        assert not self.is_empty, "an empty statistic has no range"
        low, high = self.decayed + self.ratio**self.steps * self.first
        return low, high

    def _append(self, first: Tensor, decayed: Tensor, steps: int) -> None:
        if self.is_empty:
            self.first, self.decayed, self.steps = first, decayed, steps
            return
        check_num_rows(self.first[0], first[0])
        self.decayed = self.ratio**steps * self.decayed + decayed.to(self.decayed.device)
        self.steps += steps


class Samples(NamedTensors):
    """The values themselves, `(R, n)`. For weights: they are in memory anyway, and each row has few."""

    NAMES = ("rows",)
    rows: Any

    def update(self, rows: Tensor) -> None:
        check_finite(*extremes(rows))
        if not self.is_empty:
            check_num_rows(self.rows, rows)
            rows = torch.cat([self.rows, rows.to(self.rows)], dim=1)
        self.rows = rows

    def merge(self, other: Self) -> None:
        if not other.is_empty:
            self.update(other.rows)


def extremes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest and highest value of each row, float32.

    NaN and infinity raise an error on a CPU. On other devices they show in the result: a check would stall the device.
    """
    # On CPUs two passes are faster than `aminmax`: by half on one row, fivefold on many.
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
