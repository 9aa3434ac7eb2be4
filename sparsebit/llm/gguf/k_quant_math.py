"""Scales, mins and codes of Q4_K and Q6_K with a small weighted error.

Letters: `X (rows, blocks, groups, columns)` the weights; `I` their importance, of the same shape; `s`, `m` scale and
min of a group as floats; `S`, `M` as the stored integers; `d`, `e` (`dmin` in the file) their factors; `Q` the
codes. The error is `sum I (value - X)^2`.

Each group is fitted separately: several ranges, each with the least squares for its codes. Then `d` is the best of
several that make the largest scale of a block an integer. Then integers move by one if that lowers the error, codes
follow, and `d` and `e` are fitted to them. Every step is kept only if the error falls.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsebit.llm.gguf.k_quant_blocks import (
    Q4_K_GROUP,
    Q4K,
    Q6_K_GROUP,
    Q6_K_MIDDLE,
    Q6K,
)

_CHUNK = 1 << 17  # weights at once, so that they fit the cache
_LARGEST4, _LARGEST_SIX_BITS = 15, 63
_SMALLEST_HALF = 2.0**-24
_TINY = 1e-30


@torch.no_grad()
def fit_q4_k(weight: Tensor, start: tuple[Tensor, Tensor] | None = None) -> Q4K:
    """`weight (rows, columns)` as Q4_K.

    `start`: scale and min `(rows, columns / 32)` of groups that are known already, such as those of a packed weight.
    """
    parts = []
    for rows in _row_chunks(weight):
        known = None if start is None else (_in_blocks(start[0][rows], 8), _in_blocks(start[1][rows], 8))
        parts.append(_fit_q4_k(weight[rows].float().unflatten(1, (-1, 8, Q4_K_GROUP)), known))
    return Q4K(
        *(torch.cat([getattr(part, name) for part in parts]) for name in ("d", "dmin", "scales", "mins", "codes"))
    )


@torch.no_grad()
def fit_q6_k(weight: Tensor, start: Tensor | None = None) -> Q6K:
    """`weight (rows, columns)` as Q6_K. `start`: scales `(rows, columns / 16)` that are known already."""
    parts = []
    for rows in _row_chunks(weight):
        known = None if start is None else _in_blocks(start[rows], 16)
        parts.append(_fit_q6_k(weight[rows].float().unflatten(1, (-1, 16, Q6_K_GROUP)), known))
    return Q6K(*(torch.cat([getattr(part, name) for part in parts]) for name in ("d", "scales", "codes")))


@torch.no_grad()
def fit_symmetric(weight: Tensor, group: int, lowest: int, highest: int) -> tuple[Tensor, Tensor]:
    """Scales `(rows, groups)`, rounded to float16, and codes `lowest..highest (rows, groups, group)` int8."""
    scales, codes = [], []
    for rows in _row_chunks(weight):
        X = weight[rows].float().unflatten(1, (-1, group))
        s = _round_half(_symmetric_scales(X, X.square(), lowest, highest)).float()
        scales.append(s.half())
        codes.append(_nearest(X, s, lowest, highest).to(torch.int8))
    return torch.cat(scales), torch.cat(codes)


def _fit_q4_k(X: Tensor, start: tuple[Tensor, Tensor] | None) -> Q4K:
    I = X.square().mean((-1, -2), keepdim=True).sqrt() + X.abs()  # noqa: E741 - large weights matter more
    s, m = _asymmetric_ranges(X, I) if start is None else (start[0].float(), start[1].float())
    Q = _codes4(X, s, m)
    # How much the error grows with a wrong scale, once the min is fitted to it.
    total, first = I.sum(-1).clamp(min=_TINY), (I * Q).sum(-1)
    slope = ((I * Q.square()).sum(-1) - first.square() / total).clamp(min=_TINY)
    d, S = _shared_factor(s, slope, _LARGEST_SIX_BITS, 0, 63)
    m = ((d[..., None] * S * first - (I * X).sum(-1)) / total).clamp(min=0)
    e, M = _shared_factor(m, total, _LARGEST_SIX_BITS, 0, 63)
    fit = _Affine(X, I, d, e, S, M)
    for _ in range(2):
        fit.move_integers()
        fit.fit_factors()
    fit.move_integers()
    return Q4K(fit.d.half(), fit.e.half(), fit.S.to(torch.uint8), fit.M.to(torch.uint8), fit.codes().to(torch.uint8))


class _Affine:
    """A fit of Q4_K that gets better step by step."""

    def __init__(self, X: Tensor, I: Tensor, d: Tensor, e: Tensor, S: Tensor, M: Tensor) -> None:  # noqa: E741
        self.X, self.I, self.d, self.e, self.S, self.M = X, I, d, e, S, M
        self.errors = self._errors(d, e, S, M)

    def codes(self) -> Tensor:
        return _codes4(self.X, self.d[..., None] * self.S, self.e[..., None] * self.M)

    def move_integers(self) -> None:
        """Try neighbours of each group's two integers."""
        for step, other in ((-1, 0), (1, 0), (0, -1), (0, 1), (1, 1), (-1, -1)):
            S, M = (self.S + step).clamp(0, 63), (self.M + other).clamp(0, 63)
            errors = self._errors(self.d, self.e, S, M)
            is_better = errors < self.errors
            self.S, self.M = torch.where(is_better, S, self.S), torch.where(is_better, M, self.M)
            self.errors = torch.where(is_better, errors, self.errors)

    def fit_factors(self) -> None:
        """Least squares of `d` and `e` for the integers and codes of each block."""
        scaled, M = self.S[..., None] * self.codes(), self.M[..., None].expand_as(self.X)
        aa, bb = (self.I * scaled.square()).sum((-1, -2)), (self.I * M.square()).sum((-1, -2))
        ab, ax = (self.I * scaled * M).sum((-1, -2)), (self.I * scaled * self.X).sum((-1, -2))
        bx = (self.I * M * self.X).sum((-1, -2))
        determinant = aa * bb - ab.square()
        is_sound = determinant > 1e-6 * aa * bb
        safe = torch.where(is_sound, determinant, torch.ones_like(determinant))
        d = _round_half(torch.where(is_sound, (ax * bb - ab * bx) / safe, self.d))
        e = _round_half(torch.where(is_sound, (ab * ax - aa * bx) / safe, self.e))
        errors = self._errors(d, e, self.S, self.M)
        is_better = (errors.sum(-1) < self.errors.sum(-1)) & (d > 0) & (e >= 0)
        self.d, self.e = torch.where(is_better, d, self.d), torch.where(is_better, e, self.e)
        self.errors = torch.where(is_better[..., None], errors, self.errors)

    def _errors(self, d: Tensor, e: Tensor, S: Tensor, M: Tensor) -> Tensor:
        s, m = d[..., None] * S, e[..., None] * M
        return _affine_error(self.X, self.I, s, m, _codes4(self.X, s, m))


def _asymmetric_ranges(X: Tensor, I: Tensor) -> tuple[Tensor, Tensor]:  # noqa: E741
    """Scale and min of each group, by least squares for the codes of several ranges."""
    low, high = X.amin(-1).clamp(max=0), X.amax(-1)
    width = high - low
    best_s, best_m = width / _LARGEST4, -low
    least = _affine_error(X, I, best_s, best_m, _codes4(X, best_s, best_m))
    weighted = I * X
    total, with_x, squares = I.sum(-1).clamp(min=_TINY), weighted.sum(-1), (weighted * X).sum(-1)
    for step in range(-10, 21, 2):
        Q = _codes4(X, width / (_LARGEST4 + 0.1 * step), -low)
        scaled = I * Q
        first, second, product = scaled.sum(-1), (scaled * Q).sum(-1), (scaled * X).sum(-1)
        spread = (second * total - first.square()).clamp(min=_TINY)
        s = ((total * product - first * with_x) / spread).clamp(min=0)
        m = (s * first - with_x) / total
        without = (product / second.clamp(min=_TINY)).clamp(min=0)  # the scale, if the min has to be 0
        s, m = torch.where(m < 0, without, s), m.clamp(min=0)
        # The error of these codes, multiplied out.
        errors = s * s * second + m * m * total + squares - 2 * (s * m * first + s * product - m * with_x)
        is_better = errors < least
        best_s, best_m = torch.where(is_better, s, best_s), torch.where(is_better, m, best_m)
        least = torch.where(is_better, errors, least)
    return best_s, best_m


def _fit_q6_k(X: Tensor, start: Tensor | None) -> Q6K:
    I = X.square()  # noqa: E741
    s = _symmetric_scales(X, I, -Q6_K_MIDDLE, Q6_K_MIDDLE - 1) if start is None else start.float()
    Q = _codes6(X, s)
    d, S = _shared_factor(s, (I * Q.square()).sum(-1).clamp(min=_TINY), 127, -128, 127)
    for _ in range(2):
        errors = _scaled_error(X, I, d[..., None] * S)
        for step in (-1, 1):
            moved = (S + step).clamp(-128, 127)
            found = _scaled_error(X, I, d[..., None] * moved)
            S, errors = torch.where(found < errors, moved, S), torch.minimum(found, errors)
        scaled = S[..., None] * _codes6(X, d[..., None] * S)
        wanted = (I * scaled * X).sum((-1, -2)) / (I * scaled.square()).sum((-1, -2)).clamp(min=_TINY)
        fitted = _round_half(wanted)
        found = _scaled_error(X, I, fitted[..., None] * S).sum(-1)
        d = torch.where((found < errors.sum(-1)) & (fitted > 0), fitted, d)
    Q = _codes6(X, d[..., None] * S)
    return Q6K(d.half(), S.to(torch.int8), (Q + Q6_K_MIDDLE).to(torch.uint8))


def _symmetric_scales(X: Tensor, I: Tensor, lowest: int, highest: int) -> Tensor:  # noqa: E741
    """Scales of groups, by least squares for the codes of several ranges; negative, if the largest weight is positive.

    There is one code more below 0 than above: the largest weight gets it.
    """
    place = X.abs().argmax(-1, keepdim=True)
    largest = X.gather(-1, place)[..., 0]
    best = largest / lowest

    squares = (I * X.square()).sum(-1)
    least = (I * (best[..., None] * _nearest(X, best, lowest, highest) - X).square()).sum(-1)
    for step in range(-9, 10, 2):
        Q = _nearest(X, largest / (lowest + 0.1 * step), lowest, highest)
        scaled = I * Q
        product, second = (scaled * X).sum(-1), (scaled * Q).sum(-1).clamp(min=_TINY)
        s = product / second
        errors = squares - product * s
        best, least = torch.where(errors < least, s, best), torch.minimum(errors, least)
    return best


def _shared_factor(numbers: Tensor, slope: Tensor, most: int, lowest: int, highest: int) -> tuple[Tensor, Tensor]:
    """`d (rows, blocks)` and integers `S` with `d S` near `numbers (rows, blocks, groups)`, errors weighted by `slope`.

    The largest number becomes an integer from `most / 2` to `most`, whichever fits the others best.
    """
    largest = numbers.abs().amax(-1)
    least = torch.full_like(largest, torch.inf)
    best_d, best_S = torch.zeros_like(largest), torch.zeros_like(numbers)
    for integer in range(most, most // 2, -1):
        d = _round_half(largest / integer)
        S = _nearest(numbers, d, lowest, highest)
        error = (slope * (d[..., None] * S - numbers).square()).sum(-1)
        is_better = error < least
        best_d, least = torch.where(is_better, d, best_d), torch.where(is_better, error, least)
        best_S = torch.where(is_better[..., None], S, best_S)
    return best_d, best_S


def _codes4(X: Tensor, s: Tensor, m: Tensor) -> Tensor:
    return _nearest(X + m[..., None], s, 0, _LARGEST4)


def _codes6(X: Tensor, s: Tensor) -> Tensor:
    return _nearest(X, s, -Q6_K_MIDDLE, Q6_K_MIDDLE - 1)


def _nearest(X: Tensor, s: Tensor, lowest: int, highest: int) -> Tensor:
    """Codes of `X (..., n)` with the scales `s (...)`; 0 where the scale is 0."""
    inverse = torch.where(s == 0, torch.zeros_like(s), 1 / torch.where(s == 0, torch.ones_like(s), s))
    return torch.clamp(torch.round(X * inverse[..., None]), lowest, highest)


def _affine_error(X: Tensor, I: Tensor, s: Tensor, m: Tensor, Q: Tensor) -> Tensor:  # noqa: E741
    return (I * (s[..., None] * Q - m[..., None] - X).square()).sum(-1)


def _scaled_error(X: Tensor, I: Tensor, s: Tensor) -> Tensor:  # noqa: E741
    return (I * (s[..., None] * _codes6(X, s) - X).square()).sum(-1)


def _round_half(numbers: Tensor) -> Tensor:
    """Rounded to float16, and not to zero."""
    rounded = numbers.half().float()
    smallest = torch.full_like(numbers, _SMALLEST_HALF).copysign(numbers)
    return torch.where((rounded == 0) & (numbers != 0), smallest, rounded)


def _in_blocks(numbers: Tensor, per_block: int) -> Tensor:
    return torch.unflatten(numbers, 1, (-1, per_block))


def _row_chunks(weight: Tensor) -> Iterator[slice]:
    rows = max(1, _CHUNK // weight.shape[1])
    for begin in range(0, weight.shape[0], rows):
        yield slice(begin, begin + rows)
