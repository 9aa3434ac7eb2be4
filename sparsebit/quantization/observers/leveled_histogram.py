"""`LeveledHistogram`: a histogram in which samples that are far larger than the others count less.

One histogram for each octave of the samples' magnitude (its level); the weights are decided when a range is computed,
since only then the usual level is known.
"""

from __future__ import annotations

from collections import Counter
from typing import Self

import torch
from torch import Tensor

from sparsebit.numerics.rounding.outlier_samples import level_weight, sample_levels, usual_level
from sparsebit.numerics.spec import PerTensor, to_rows
from sparsebit.quantization.observers.histogram import Histogram
from sparsebit.quantization.observers.statistics import State

# The most histograms: samples below the highest levels are counted at the lowest of these.
MOST_LEVELS = 6
# With so many dimensions the first one counts samples: images, and feature maps.
FEWEST_DIMENSIONS = 4
# Samples with a smaller weight do not widen the ranges that are tried.
SMALLEST_WEIGHT = 0.05


class LeveledHistogram:
    """A histogram of one row for each octave of the samples' magnitude, and how many samples each has.

    Like a histogram it depends on the samples alone: not on their order, nor on batches and processes.
    """

    def __init__(self) -> None:
        self.histograms: dict[int, Histogram] = {}
        self.num_samples: Counter[int] = Counter()

    @property
    def is_empty(self) -> bool:
        return not self.histograms

    def update(self, rows: Tensor) -> None:
        """Add a tensor. Each sample of images, `(samples, channels, height, width)`, has its own level; other tensors
        have one.

        The first dimension of a sequence may be its tokens, of which the first is often far larger than the others
        and gets their attention.
        """
        has_samples = rows.ndim >= FEWEST_DIMENSIONS
        samples = rows if has_samples else rows[None]
        levels = sample_levels(samples) if has_samples else torch.zeros(1, dtype=torch.long)
        for level in levels.unique().tolist():
            is_here = levels == level
            part = samples if bool(is_here.all()) else samples[is_here]
            histogram = Histogram()
            histogram.update(to_rows(part, PerTensor()))
            self._add(level, histogram, len(part))

    def merge(self, other: Self) -> None:
        for level, histogram in other.histograms.items():
            self._add(level, histogram, other.num_samples[level])

    def _add(self, level: int, histogram: Histogram, num_samples: int) -> None:
        self.histograms.setdefault(level, Histogram()).merge(histogram)
        self.num_samples[level] += num_samples
        if len(self.histograms) > MOST_LEVELS:
            lowest, above = sorted(self.histograms)[:2]
            self.histograms[above].merge(self.histograms.pop(lowest))
            self.num_samples[above] += self.num_samples.pop(lowest)

    def state(self) -> State:
        parts = {level: part.state() for level, part in self.histograms.items()}
        found = {f"{level}.{name}": value for level, part in parts.items() for name, value in part.items()}
        return found | {f"{level}.samples": torch.tensor(count) for level, count in self.num_samples.items()}

    def load_state(self, state: State) -> None:
        self.__init__()  # type: ignore[misc]
        for level in dict.fromkeys(key.partition(".")[0] for key in state):
            prefix, part = f"{level}.", Histogram()
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            self.num_samples[int(level)] = int(own.pop("samples"))
            part.load_state(own)
            self.histograms[int(level)] = part

    def combined(self) -> Histogram:
        """One histogram of all samples; the values of far larger samples have a weight below 1."""
        return Histogram.weighted(self._parts())

    def extremes(self) -> tuple[Tensor, Tensor]:
        """The lowest and the highest value, `(1,)` each, of the samples that a range must cover."""
        parts = [part for part, weight in self._parts() if weight >= SMALLEST_WEIGHT]
        return torch.stack([part.low for part in parts]).amin(0), torch.stack([part.high for part in parts]).amax(0)

    @property
    def num_far(self) -> int:
        """How many samples are so far above the others that they get a small weight."""
        usual = usual_level(self.num_samples)
        return sum(count for level, count in self.num_samples.items() if level_weight(level, usual) < 1)

    def _parts(self) -> list[tuple[Histogram, float]]:
        usual = usual_level(self.num_samples)
        return [(part, level_weight(level, usual)) for level, part in self.histograms.items()]
