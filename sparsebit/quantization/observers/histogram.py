"""`Histogram`: how many values of each row fell into each of a fixed set of bins, 40 octaves of magnitude deep.

The bins are spaced like floating-point numbers: every octave has the same number of them, so a bin's width is a
fixed fraction of the values in it. One far outlier does not change the resolution of all other values. The bins
never move. So the counts depend on the values only, bit by bit: not on their order, nor on their distribution
over batches or processes before a merge.

A value's bin is found without a search: the value is multiplied by a power of two that puts the row's largest
magnitude at a fixed float32 exponent, and the upper bits of the product (exponent and first mantissa bits) are its key.
A new largest magnitude shifts all counts by whole octaves; values that fall below the lowest octave count as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from sparsebit.quantization.observers.statistics import NamedTensors, State, check_finite, check_num_rows, extremes

# From the octave of the largest magnitude down; smaller values count as zero. An outlier that is 1e9 times all other
# values leaves ten octaves for these.
NUM_OCTAVES = 40
# Below the octaves of the bins: one for smaller values, and one for float32's subnormal numbers, which are rounded.
OCTAVES_OF_ZEROS = 2
# Bins in an octave, as a power of two. At 8, a bin at the top is 1/512 to 1/256 of the largest magnitude wide, no more
# than an 8-bit level. A row takes 168 KB at 8, 42 KB at 6.
BITS_OF_LONE_ROW, BITS_OF_MANY_ROWS = 8, 6
# The exponent of a row of zeros, and the least of any row: 40 octaves below it, float32 still has normal numbers.
SMALLEST_EXPONENT = -80
# Values that are binned at a time. Measured: temporaries of 8 MB are within 10 % of the fastest, for any tensor.
CHUNK = 1 << 20


class Histogram(NamedTensors):
    """Counts of each row's values by sign and magnitude; zeros and extremes, exactly.

    `exponent` is that of the row's largest magnitude. A sign's bins divide each of the octaves from
    `2^(exponent - NUM_OCTAVES + 1)` up to `2^(exponent + 1)` into `2^bits` equal parts.
    """

    NAMES = ("raw", "zeros", "low", "high", "exponent")
    # (R, 2, keys) int64: positive, negative. The keys of the first OCTAVES_OF_ZEROS octaves are empty between updates.
    raw: Any
    zeros: Tensor  # (R,) int64: values that are zero or too small for the bins
    low: Tensor  # (R,) float32, <= 0
    high: Tensor  # (R,) float32, >= 0
    exponent: Tensor  # (R,) int64: 2^exponent <= largest magnitude < 2^(exponent + 1)
    _factors: list[Tensor] | None  # computed from the exponent

    def __init__(self, num_rows: int | None = None) -> None:
        """`num_rows`: of all histograms that must have the same bins, if this one is for some of the rows."""
        super().__init__()
        self._num_rows = num_rows

    @property
    def bits(self) -> int:
        """Bins in an octave, as a power of two."""
        return int(self.raw.shape[2] // (NUM_OCTAVES + OCTAVES_OF_ZEROS)).bit_length() - 1

    # --- reading

    @property
    def counts(self) -> Tensor:
        """Values in each bin, `(R, 2, B)` int64: positive, negative, by magnitude; without zeros.

        The first bin is empty: it ends where values begin.
        """
        found: Tensor = self.raw[..., self._first_key - 1 :]
        return found

    @property
    def edges(self) -> Tensor:
        """The magnitudes between the bins, `(R, B + 1)` float64, from 0 to the end of the last octave."""
        parts = 1 << self.bits
        key = torch.arange(NUM_OCTAVES * parts + 1, device=self.exponent.device)
        unit = torch.ldexp(1 + (key % parts).double() / parts, key // parts)
        return torch.cat([torch.zeros_like(unit[:1]), unit])[None] * self._smallest[:, None]

    @property
    def ends(self) -> Tensor:
        """The largest magnitude of each sign, `(R, 2)` float64."""
        return torch.stack([self.high, -self.low], 1).double()

    def bins(self) -> tuple[Tensor, Tensor, Tensor]:
        """Counts, left and right edges of the bins as far as the extremes, `(R, 2, B + 1)` float64.

        The bin of an extreme ends there, and one value is known to be at the extreme itself: it has the bin after that,
        of width zero. (It may be an outlier, far from the middle of its bin.)
        """
        counts = torch.nn.functional.pad(self.counts, (0, 1)).double()
        place = self.bin_of(self.ends)[..., None]
        number = counts.gather(2, place).clamp(max=1)  # less than one if the extreme has a smaller weight
        counts.scatter_add_(2, place, -number).scatter_add_(2, place + 1, number)
        edges = torch.nn.functional.pad(self.edges, (0, 1), value=torch.inf)[:, None].minimum(self.ends[..., None])
        return counts, edges[..., :-1], edges[..., 1:]

    def of_rows(self, rows: slice) -> Histogram:
        """The histogram of some rows, a view of this one."""
        part = Histogram()
        for name, value in self.state().items():
            setattr(part, name, value[rows])
        return part

    @classmethod
    def weighted(cls, parts: Sequence[tuple[Histogram, float]]) -> Histogram:
        """The values of all parts; values of a part with a weight below 1 count as fractions, in `raw` as float64."""
        whole = cls()
        for part, _ in parts:
            whole.merge(part)
        if whole.raw is None or all(weight == 1 for _, weight in parts):
            return whole
        raw = torch.zeros_like(whole.raw, dtype=torch.float64)
        for part, weight in parts:
            if part.raw is not None:
                moved, _ = _moved(part.raw, whole.exponent - part.exponent, whole._first_key)
                raw.add_(moved, alpha=weight)
        whole.raw = raw
        return whole

    def bin_of(self, magnitude: Tensor, rows: slice = slice(None)) -> Tensor:
        """The bin of magnitudes `(R, ...)` float64, int64; the last one for larger values. `rows`: the rows that they
        are of.
        """
        scaled = magnitude / self._smallest[rows].view(-1, *[1] * (magnitude.ndim - 1))
        # The exponent and the upper mantissa bits of the float64; 1023 is the exponent's bias.
        key = (scaled.view(torch.int64) >> (52 - self.bits)).sub_((1023 << self.bits) - 1)
        return key.clamp_(0, NUM_OCTAVES << self.bits)

    # --- adding

    def update(self, rows: Tensor) -> None:
        low, high = extremes(rows)
        check_finite(low, high)
        self._grow(low, high)
        num_rows, num_signs, num_keys = self.raw.shape
        if self._factors is None:
            self._factors = _factors(self.exponent)
        factor, *more = self._factors
        sign_bit = 1 << (8 + self.bits)
        first_key = torch.arange(num_rows, device=rows.device, dtype=torch.int32)[:, None] * (num_signs * num_keys)
        has_negative, zero = bool((low < 0).any()), factor.new_zeros(())
        for part in rows.split(max(1, max(CHUNK, 4 * self.raw.numel()) // num_rows), dim=1):
            # `addcmul` with zero turns -0.0 into 0.0, whose sign bit would otherwise make it negative.
            scaled = part.float() * factor if has_negative else torch.addcmul(zero, part.float(), factor)
            for another in more:
                scaled *= another
            key = scaled.view(torch.int32)
            key >>= 23 - self.bits
            if has_negative:  # the shift keeps the sign bit: move keys of negative values behind those of positive ones
                key.add_(key >> 31, alpha=-(sign_bit + num_keys))
            if num_rows > 1:
                key += first_key
            self._count(key.flatten())
        small = self.raw[..., : self._first_key]
        self.zeros += small.sum((1, 2))
        small.zero_()

    def merge(self, other: Self) -> None:
        if other.raw is None:
            return
        device = other.raw.device if self.raw is None else self.raw.device
        self._grow(other.low.to(device), other.high.to(device))
        raw, small = _moved(other.raw.to(device), self.exponent - other.exponent.to(device), self._first_key)
        self.raw += raw
        self.zeros += other.zeros.to(device) + small

    def load_state(self, state: State) -> None:
        super().load_state({name: value.clone() for name, value in state.items()})  # the counts are updated in place
        self._factors = None

    @property
    def _first_key(self) -> int:
        """The first key that belongs to a bin."""
        return OCTAVES_OF_ZEROS << self.bits

    @property
    def _smallest(self) -> Tensor:
        """The least magnitude that has a bin, `(R,)` float64."""
        return _power_of_two(self.exponent - NUM_OCTAVES + 1)

    def _count(self, keys: Tensor) -> None:
        flat = self.raw.view(-1)
        if 8 * len(keys) < len(flat):  # bincount would touch every bin for a few values
            flat.index_add_(0, keys, torch.ones_like(keys, dtype=torch.int64))
        else:
            flat += torch.bincount(keys, minlength=len(flat))

    def _grow(self, low: Tensor, high: Tensor) -> None:
        """Make room for values in `[low, high]`, by shifting the counts if the largest magnitude grows."""
        low, high = low.clamp(max=0), high.clamp(min=0)
        if self.raw is None:
            is_lone = (self._num_rows or len(low)) == 1
            num_keys = (NUM_OCTAVES + OCTAVES_OF_ZEROS) << (BITS_OF_LONE_ROW if is_lone else BITS_OF_MANY_ROWS)
            self.raw = torch.zeros(len(low), 2, num_keys, dtype=torch.int64, device=low.device)
            self.zeros = torch.zeros(len(low), dtype=torch.int64, device=low.device)
            self.low, self.high, self.exponent = low, high, _exponent(low, high)
            return
        check_num_rows(self.low, low)
        if not bool(((low < self.low) | (high > self.high)).any()):
            return
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)
        exponent = _exponent(self.low, self.high)
        if not torch.equal(exponent, self.exponent):
            self.raw, small = _moved(self.raw, exponent - self.exponent, self._first_key)
            self.zeros += small
            self.exponent, self._factors = exponent, None


def _exponent(low: Tensor, high: Tensor) -> Tensor:
    largest = torch.maximum(-low, high)
    exponent = torch.frexp(largest).exponent.long() - 1
    return exponent.where(largest > 0, SMALLEST_EXPONENT).clamp(min=SMALLEST_EXPONENT)


def _factors(exponent: Tensor) -> list[Tensor]:
    """Factors for the values, `(R, 1)` each: the exponent field of the product, a float32, is the value's octave.

    It is 0 for all smaller values, so that nothing needs to be clamped.
    """
    shift = NUM_OCTAVES + OCTAVES_OF_ZEROS - 128 - exponent
    parts = [shift.clamp(min=-126)]
    if bool((shift < -126).any()):  # for the very largest values, one float32 number cannot hold the factor
        parts.append(shift.clamp(max=-126) + 126)
    return [_power_of_two(part).float()[:, None] for part in parts]


def _moved(raw: Tensor, octaves: Tensor, first_key: int) -> tuple[Tensor, Tensor]:
    """The counts shifted to a largest magnitude that is `octaves (R,)` higher, and how many values became too small."""
    num_keys = raw.shape[2]
    parts = num_keys // (NUM_OCTAVES + OCTAVES_OF_ZEROS)
    index = (torch.arange(num_keys, device=raw.device) - octaves[:, None] * parts).clamp_(min=0)
    moved = torch.zeros_like(raw).scatter_add_(2, index[:, None].expand_as(raw), raw)
    small = moved[..., :first_key].sum((1, 2))
    moved[..., :first_key] = 0
    return moved, small


def _power_of_two(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)
