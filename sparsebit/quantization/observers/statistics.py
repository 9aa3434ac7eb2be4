"""Streaming statistics over rows `(R, n)`, one row per scale: constant memory, and halves that merge to the whole.

Every statistic has `update(rows)`, `merge(other)`, `state()`, `load_state(state)` and `is_empty`, and lives on the
device of its data. A row's values may come in any number of updates; the number of rows is fixed by the first.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import Self

from sparsebit.errors import CalibrationError

State = dict[str, Tensor]

# Bins of a histogram. At least half of them are always in use, so an 8-bit level spans 8 bins or more of a lone row.
BINS_OF_LONE_ROW, BINS_OF_MANY_ROWS = 4096, 1024
# 2^-exponent must stay a finite float32; data below 2^-120 shares the bin of zero, which harms nobody.
SMALLEST_EXPONENT = -120
# Values binned at a time: temporaries of 8 MB are within 10 % of the fastest, whatever the size of the tensor.
CHUNK = 1 << 20


class Statistic(Protocol):
    """What an observer needs of its statistic."""

    @property
    def is_empty(self) -> bool: ...
    def update(self, rows: Tensor) -> None: ...
    def merge(self, other: Self) -> None: ...
    def state(self) -> State: ...
    def load_state(self, state: State) -> None: ...


class MinMax:
    """The extremes `low`, `high` of each row, float32 `(R,)`."""

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
    """The values themselves, `(R, n)`. For weights: they are in memory anyway, and are few in each row."""

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


class Histogram:
    """Counts of each row's non-zero values in bins `[k * width, (k + 1) * width)`; zeros and extremes, exactly.

    The width is the smallest power of two for which the window `[low, high]`, zero included, fits into the bins: a
    function of the extremes alone. Coarser bins are pairs of finer ones. So growing loses nothing, and the outcome
    depends on the values only, bit by bit: not on their order, nor on how they were dealt out before a merge.
    """

    def __init__(self) -> None:
        self.counts: Tensor | None = None  # (R, B) int64
        self.low: Tensor  # (R,) float32, <= 0
        self.high: Tensor  # (R,) float32, >= 0
        self.zeros: Tensor  # (R,) int64
        self.exponent: Tensor  # (R,) int64: width = 2^exponent
        self.first_bin: Tensor  # (R,) int64: k of counts[:, 0]

    @property
    def is_empty(self) -> bool:
        return self.counts is None

    @property
    def width(self) -> Tensor:
        """Bin width `(R,)`, float64."""
        return _power_of_two(self.exponent)

    @property
    def bins(self) -> Tensor:
        """The number k of each bin `[k * width, (k + 1) * width)`, int64 `(R, B)`."""
        assert self.counts is not None
        return self.first_bin[:, None] + torch.arange(self.counts.shape[1], device=self.counts.device)

    def update(self, rows: Tensor) -> None:
        low, high = extremes(rows)
        check_finite(low, high)
        self._grow(low, high)
        assert self.counts is not None
        num_rows, num_bins = self.counts.shape
        per_width = _power_of_two(-self.exponent).float()[:, None]
        first_index = (torch.arange(num_rows, device=rows.device) * num_bins - self.first_bin)[:, None]
        index_type = torch.int16 if self.counts.numel() <= 1 << 15 else torch.int32
        has_negative, is_shifted = bool((low < 0).any()), bool(first_index.any())
        for part in rows.split(max(1, max(CHUNK, 4 * self.counts.numel()) // num_rows), dim=1):
            position = part.float() * per_width  # exact: powers of two
            if has_negative:
                position.floor_()  # before the shift, which would round a tiny negative up to a whole number
            index = position.to(index_type)
            if is_shifted:
                index += first_index.to(index_type)
            self.counts += torch.bincount(index.flatten(), minlength=self.counts.numel()).view_as(self.counts)
        zeros = _num_zeros(rows)
        self.zeros += zeros
        self.counts.scatter_add_(1, -self.first_bin[:, None], -zeros[:, None])

    def merge(self, other: Self) -> None:
        if other.counts is None:
            return
        device = other.counts.device if self.counts is None else self.counts.device
        self._grow(other.low.to(device), other.high.to(device))
        assert self.counts is not None
        window = other.exponent.to(device), other.first_bin.to(device)
        self.counts += _rebinned(other.counts.to(device), window, (self.exponent, self.first_bin))
        self.zeros += other.zeros.to(device)

    def state(self) -> State:
        if self.counts is None:
            return {}
        return {name: getattr(self, name) for name in ("counts", "low", "high", "zeros", "exponent", "first_bin")}

    def load_state(self, state: State) -> None:
        self.counts = None
        for name, value in state.items():
            # A copy: the counts are updated in place.
            setattr(self, name, value.clone())

    def _grow(self, low: Tensor, high: Tensor) -> None:
        """Makes the window hold `[low, high]` too."""
        low, high = low.clamp(max=0), high.clamp(min=0)
        if self.counts is None:
            num_rows = len(low)
            num_bins = BINS_OF_LONE_ROW if num_rows == 1 else BINS_OF_MANY_ROWS
            self.counts = torch.zeros(num_rows, num_bins, dtype=torch.int64, device=low.device)
            self.zeros = torch.zeros(num_rows, dtype=torch.int64, device=low.device)
            self.low, self.high = low, high
            self.exponent, self.first_bin = _window(low, high, num_bins)
            return
        check_num_rows(self.low, low)
        if not bool(((low < self.low) | (high > self.high)).any()):
            return
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)
        window = _window(self.low, self.high, self.counts.shape[1])
        self.counts = _rebinned(self.counts, (self.exponent, self.first_bin), window)
        self.exponent, self.first_bin = window


def extremes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest and highest value of each row, float32.

    NaN and infinity are refused on a CPU. Elsewhere they show in the answer: looking at it would stall the device.
    """
    # On CPUs two passes beat aminmax: by half on one row, fivefold on many.
    low, high = rows.amin(1).float(), rows.amax(1).float()
    if low.device.type == "cpu":
        check_finite(low, high)
    return low, high


def check_finite(low: Tensor, high: Tensor) -> None:
    """Refuses data with NaN or infinity, seen by its extremes."""
    if torch.compiler.is_compiling():  # a compiled step cannot look at values
        return
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        raise CalibrationError(
            f"values from {float(low.min()):g} to {float(high.max()):g}: no range can be made of NaN or infinity; "
            "check that the float model gives finite values for this input, and look into the calibration data"
        )


def check_num_rows(known: Tensor, given: Tensor) -> None:
    """Refuses data with another number of rows than before."""
    if len(known) != len(given):
        raise CalibrationError(
            f"{len(given)} channels or groups after {len(known)} in an earlier batch: the quantized axis must have the "
            "same length in every batch; set LAYOUT (NCHW or NLC) to match the tensor, or quantize it per tensor"
        )


def _num_zeros(rows: Tensor) -> Tensor:
    """Number of zeros in each row."""
    # Counting along a dimension takes five times as long as counting all, and often there are none.
    zeros = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    num_zeros = rows.numel() - torch.count_nonzero(rows)
    if len(rows) == 1:
        return zeros + num_zeros
    return rows.shape[1] - torch.count_nonzero(rows, dim=1) if bool(num_zeros) else zeros


def _window(low: Tensor, high: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
    """The least exponent for which the bins from `low` to `high` are `num_bins` or fewer, and the first of them."""
    low, high = low.double(), high.double()
    exponent = (torch.frexp(high - low).exponent.long() - num_bins.bit_length()).clamp(min=SMALLEST_EXPONENT)
    for _ in range(2):  # the span is less than 2 * num_bins widths at first, so that two doublings always do
        width = _power_of_two(exponent)
        exponent = exponent + ((high / width).floor() - (low / width).floor() >= num_bins).long()
    return exponent, (low / _power_of_two(exponent)).floor().long()


def _rebinned(counts: Tensor, window: tuple[Tensor, Tensor], new_window: tuple[Tensor, Tensor]) -> Tensor:
    """The same counts in a wider window (exponent, first bin) whose bins are as wide, or 2, 4, 8... times as wide."""
    (exponent, first_bin), (new_exponent, new_first_bin) = window, new_window
    bins = first_bin[:, None] + torch.arange(counts.shape[1], device=counts.device)
    # The shift rounds towards minus infinity. Bins that nothing fell into may lie outside the new window.
    index = (bins >> (new_exponent - exponent)[:, None]) - new_first_bin[:, None]
    return torch.zeros_like(counts).scatter_add_(1, index.clamp(0, counts.shape[1] - 1), counts)


def _power_of_two(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)
