"""Samples that are far larger than the others: how large each is, and its weight in a sum of squared errors.

Networks may respond to a few inputs in a hundred with activations fifty times as large as usual (measured: a RegNet, 3
of 512 images). In a sum of squares only these few count: a range that contains them leaves few codes for the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

# The level that this share of the samples does not exceed is the reference; with fewer than 50 samples, the highest.
_USUAL_SHARE = 0.98
# Levels above the reference at which a sample still has full weight.
_MARGIN = 1


def sample_levels(x: Tensor) -> Tensor:
    """The octave of the root mean square of each sample of `x (samples, ...)`, int64.

    >>> sample_levels(torch.tensor([[1.0, 1.0], [3.0, -3.0], [0.3, 0.0]]))
    tensor([ 0,  1, -3])
    """
    norm = torch.linalg.vector_norm(x, dim=tuple(range(1, x.ndim)), dtype=torch.promote_types(x.dtype, torch.float32))
    rms = norm / math.sqrt(max(1, math.prod(x.shape[1:])))
    return torch.frexp(rms).exponent.long() - 1


def usual_level(counts: Mapping[int, int]) -> int:
    """The level that 98 % of the samples do not exceed; `counts`: how many samples each level has.

    >>> usual_level({0: 60, 1: 38, 6: 2})
    1
    """
    levels = sorted(counts)
    reached = itertools.accumulate(counts[level] for level in levels)
    wanted = math.ceil(_USUAL_SHARE * sum(counts.values()))
    return next(level for level, number in zip(levels, reached, strict=True) if number >= wanted)


def level_weight(level: int, usual: int) -> float:
    """The weight of a sample: 1 up to an octave above the usual level, beyond it a sixteenth for each octave.

    A quarter would give all far larger samples the weight of one an octave above the usual level. That would still
    widen ranges, without benefit: a range that fits the others cannot contain these.

    >>> [level_weight(level, 1) for level in (0, 1, 2, 3, 4)]
    [1.0, 1.0, 1.0, 0.0625, 0.00390625]
    """
    return float(16.0 ** min(0, usual + _MARGIN - level))
