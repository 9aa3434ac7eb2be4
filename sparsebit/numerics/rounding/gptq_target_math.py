"""The weight that GPTQ rounds if a layer's input differs from the float model's; legend: `gptq_math`.

`target_weight`: Li et al., "GPTAQ" (2025), section 4, and Zhang et al., "Qronos" (2025), section 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from sparsebit.numerics.rounding.gptq_math import InverseFactor
from sparsebit.numerics.rounding.hessian import inverse_factor
from sparsebit.numerics.rounding.scale_search_math import Rounding
from sparsebit.numerics.weight_grid import Grid

# `(H, cross)` of each half of the data.
Halves = Sequence[tuple[Tensor, Tensor]]


def target_weight(W: Tensor, H: Tensor, cross: Tensor, damping: float, share: float = 1.0) -> Tensor:
    """The weight whose output on the quantized model's inputs is nearest to that of `W` on the float model's.

    `cross = X_float^T X / n`. With `T = W cross H^-1` the error `|X_float W^T - X V^T|^2` is
    `tr((T - V) H (T - V)^T)` and a remainder that no `V` changes: GPTQ on `T` corrects for the inputs, without any
    change of GPTQ. Damped: `T = W + share * W (cross - H) (H + damping)^-1`, the ridge solution that stays near `W`.
    """
    U = inverse_factor(H, damping)
    return W + share * (W @ (cross - H) @ U.mT) @ U


def chosen_damping(W: Tensor, halves: Halves) -> float | None:
    """The damping for which `target_weight` is best on held-out data; None: `W` itself is best.

    A fit to one half of the data is judged on the other. With few rows for each column, or with differing samples, a
    fit to all data would follow its noise.
    """
    errors = dict.fromkeys((None, 0.01, 0.1, 1.0), 0.0)
    for fitted, judge in itertools.permutations(halves, 2):
        for damping in errors:
            V = W if damping is None else target_weight(W, *fitted, damping)
            errors[damping] += _judged_error(W, V, judge)
    return min(errors, key=errors.__getitem__)


def chosen_rounding(
    W: Tensor, halves: Halves, target: Callable[[Tensor, Tensor], Tensor], grid: Grid, rounding: Rounding
) -> Rounding:
    """The rounding, with its damping or a larger one, whichever is best on held-out data.

    `target`: the weight that is rounded, from `H` and `cross` of a half. GPTQ moves errors into directions in which the
    data has hardly any input. With few rows for each column there are many such directions, and other data has inputs
    there. Damping moves the result towards rounding to nearest.
    """
    errors = dict.fromkeys((rounding.damping, *(d for d in (0.1, 1.0, 10.0) if d > rounding.damping)), 0.0)
    for fitted, judge in itertools.permutations(halves, 2):
        wanted = target(*fitted)
        for damping in errors:
            V = grid.values(InverseFactor(fitted[0], replace(rounding, damping=damping)).round(wanted, grid))
            errors[damping] += _judged_error(W, V, judge)
    return replace(rounding, damping=min(errors, key=errors.__getitem__))


def _judged_error(W: Tensor, V: Tensor, judge: tuple[Tensor, Tensor]) -> float:
    """The squared error of `V` on quantized inputs against `W` on float ones, minus a constant."""
    H, cross = judge
    return float(((V @ H - 2 * (W @ cross)) * V).sum())
