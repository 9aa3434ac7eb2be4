"""Q4_K and Q6_K, blocks of 256 weights in GGUF files: their bytes, and scales, mins and codes with a small error.

| type | bytes | a weight is | integers |
|---|---|---|---|
| Q4_K | 144 | `d * scale * code - dmin * min` | codes 0..15; of 32 weights a scale and a min, 0..63 |
| Q6_K | 210 | `d * scale * (code - 32)` | codes 0..63; of 16 weights a scale, -128..127 |

`d` and `dmin` are float16. Values are computed in float32 in the order of the formula, as llama.cpp and the package
gguf compute them.

Letters: `X (rows, blocks, groups, columns)` the weights; `I` their importance, of the same shape; `s`, `m` scale and
min of a group as floats; `S`, `M` as the stored integers; `d`, `e` (`dmin` in the file) their factors; `Q` the
codes. The error is `sum I (value - X)^2`.

Each group is fitted separately: several ranges, each with the least squares for its codes. Then `d` is the best of
several that make the largest scale of a block an integer. Then integers move by one if that lowers the error, codes
follow, and `d` and `e` are fitted to them. Every step is kept only if the error falls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SUPER_BLOCK = 256
Q4_K_BYTES, Q6_K_BYTES = 144, 210
Q4_K_GROUP, Q6_K_GROUP = 32, 16
Q6_K_MIDDLE = 32


@dataclass(frozen=True)
class Q4K:
    """`d`, `dmin (rows, blocks)` float16; `scales`, `mins (rows, blocks, 8)`; `codes (rows, blocks, 8, 32)`: uint8."""

    d: Tensor
    dmin: Tensor
    scales: Tensor
    mins: Tensor
    codes: Tensor

    def values(self) -> Tensor:
        """`(rows, columns)` float32."""
        scales = (self.d.float()[..., None] * self.scales.float())[..., None]
        mins = (self.dmin.float()[..., None] * self.mins.float())[..., None]
        return (scales * self.codes.float() - mins).flatten(1)

    def to_bytes(self) -> Tensor:
        """`(rows, blocks * 144)` uint8."""
        low, high = self.codes[..., 0::2, :], self.codes[..., 1::2, :]
        numbers = [_half_bytes(self.d), _half_bytes(self.dmin), _pack_six_bits(self.scales, self.mins)]
        return torch.cat([*numbers, (low | high << 4).flatten(-2)], -1).flatten(1).contiguous()

    @classmethod
    def from_bytes(cls, data: Tensor) -> Q4K:
        blocks = data.unflatten(1, (-1, Q4_K_BYTES))
        scales, mins = _unpack_six_bits(blocks[..., 4:16])
        packed = blocks[..., 16:].unflatten(-1, (4, 32))
        codes = torch.stack([packed & 15, packed >> 4], -2).flatten(-3, -2)
        return cls(_half(blocks[..., 0:2]), _half(blocks[..., 2:4]), scales, mins, codes)


@dataclass(frozen=True)
class Q6K:
    """`d (rows, blocks)` float16; `scales (rows, blocks, 16)` int8; `codes (rows, blocks, 16, 16)` uint8."""

    d: Tensor
    scales: Tensor
    codes: Tensor

    def values(self) -> Tensor:
        """`(rows, columns)` float32."""
        scales = (self.d.float()[..., None] * self.scales.float())[..., None]
        return (scales * (self.codes.float() - Q6_K_MIDDLE)).flatten(1)

    def to_bytes(self) -> Tensor:
        """`(rows, blocks * 210)` uint8: lower four bits, upper two bits, scales, `d`."""
        codes = self.codes.flatten(-2).unflatten(-1, (2, 4, 32))  # halves of a block, quarters of a half
        low, high = codes & 15, codes >> 4
        lower = torch.cat([low[..., 0, :] | low[..., 2, :] << 4, low[..., 1, :] | low[..., 3, :] << 4], -1)
        upper = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
        parts = [lower.flatten(-2), upper.flatten(-2), self.scales.view(torch.uint8), _half_bytes(self.d)]
        return torch.cat(parts, -1).flatten(1).contiguous()

    @classmethod
    def from_bytes(cls, data: Tensor) -> Q6K:
        blocks = data.unflatten(1, (-1, Q6_K_BYTES))
        lower = blocks[..., :128].unflatten(-1, (2, 2, 32))  # halves of a block, lower and upper half of 64 bytes
        upper = blocks[..., 128:192].unflatten(-1, (2, 32))
        low = torch.cat([lower & 15, lower >> 4], -2)
        high = torch.stack([upper >> shift & 3 for shift in (0, 2, 4, 6)], -2)
        codes = (low | high << 4).flatten(-3).unflatten(-1, (16, 16))
        scales = blocks[..., 192:208].contiguous().view(torch.int8)
        return cls(_half(blocks[..., 208:210]), scales, codes)


def _pack_six_bits(scales: Tensor, mins: Tensor) -> Tensor:
    """Eight scales and eight mins of six bits in 12 bytes: the upper two bits of the last four are in the first."""
    first = scales[..., :4] | scales[..., 4:] >> 4 << 6
    second = mins[..., :4] | mins[..., 4:] >> 4 << 6
    third = scales[..., 4:] & 15 | (mins[..., 4:] & 15) << 4
    return torch.cat([first, second, third], -1)


def _unpack_six_bits(data: Tensor) -> tuple[Tensor, Tensor]:
    first, second, third = data[..., :4], data[..., 4:8], data[..., 8:]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
    mins = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)
    return scales, mins


def _half_bytes(numbers: Tensor) -> Tensor:
    return numbers[..., None].contiguous().view(torch.uint8)


def _half(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16)[..., 0]


_CHUNK = 1 << 17  # weights at once, so that they fit the cache
_LARGEST4, _LARGEST_SIX_BITS = 15, 63
_SMALLEST_HALF = 2.0**-24
_TINY = 1e-30


@torch.no_grad()
def fit_q4_k(weight: Tensor, start: tuple[Tensor, Tensor] | None = None) -> Q4K:
    """`weight (rows, columns)` as Q4_K. `start`: scales and mins `(rows, columns / 32)`, as of a packed weight."""
    parts = []
    for rows in _row_chunks(weight):
        known = None if start is None else (_in_blocks(start[0][rows], 8), _in_blocks(start[1][rows], 8))
        parts.append(_fit_q4_k(weight[rows].float().unflatten(1, (-1, 8, Q4_K_GROUP)), known))
    return Q4K(*map(torch.cat, zip(*(vars(part).values() for part in parts), strict=True)))


@torch.no_grad()
def fit_q6_k(weight: Tensor, start: Tensor | None = None) -> Q6K:
    """`weight (rows, columns)` as Q6_K. `start`: scales `(rows, columns / 16)` that are known already."""
    parts = []
    for rows in _row_chunks(weight):
        known = None if start is None else _in_blocks(start[rows], 16)
        parts.append(_fit_q6_k(weight[rows].float().unflatten(1, (-1, 16, Q6_K_GROUP)), known))
    return Q6K(*map(torch.cat, zip(*(vars(part).values() for part in parts), strict=True)))


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
    """Scales by least squares for the codes of several ranges. The largest weight gets the one more code below 0."""
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
    """`d (rows, blocks)` and integers `S` with `d S` near `numbers (rows, blocks, groups)`, errors weighted by `slope`:
    the largest becomes an integer from `most / 2` to `most`, whichever fits the others best.
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
