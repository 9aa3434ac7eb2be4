"""Which weights of a layer are pruned by its inputs, and least squares: the rest compensates for the removed part.

Legend: `W (groups, rows, columns)` the dense weight, `M` its mask (False: zero), `V` the unknown weight,
`H = X^T X / n (groups, columns, columns)` of the layer's current inputs, `C = X_dense^T X / n` with those of
the dense model. The loss is the squared error of the layer's output, `|X_dense W^T - X V^T|^2 / n`, plus
`damping * mean(diagonal of H) * |V - W * M|^2`, over all `V` that are zero where `M` is. Rows are independent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsebit.numerics.rounding.hessian import damped, inverse_factor

# Conjugate gradients start at `W * M` and lower the loss in every step, so that an early end is safe.
_MOST_STEPS = 100
_TOLERANCE = 1e-10


def fit_masked(W: Tensor, H: Tensor, C: Tensor, M: Tensor, damping: float = 0.01) -> Tensor:
    """The best `V`. Rows with the same zeros are solved directly; others by conjugate gradients, all at once."""
    start = W * M
    ridge = damped(H, damping) - H
    matrix, wanted = H + ridge, W @ C + start @ ridge
    if (columns := _shared_columns(M)) is not None:
        return _solve(matrix, wanted, columns) * M
    return _descend(matrix, wanted, M, start)


def output_error(W: Tensor, V: Tensor, H: Tensor, C: Tensor) -> Tensor:
    """The squared error of each row's output, minus `|X_dense w|^2 / n`, which no `V` changes: `(groups, rows)`."""
    return ((V @ H - 2 * (W @ C)) * V).sum(-1)


def held_out_damping(W: Tensor, M: Tensor, halves: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    """The damping whose `V`, fitted to one half of the data, is best on the other; None: `W * M` is better still.

    `halves`: `(H, C)` of each half. With few rows for each column, a fit would follow their noise.
    """
    (H, C), judge = halves
    errors: dict[float | None, float] = {None: float(output_error(W, W * M, *judge).sum())}
    for damping in (0.001, 0.01, 0.1, 1.0):
        errors[damping] = float(output_error(W, fit_masked(W, H, C, M, damping), *judge).sum())
    return min(errors, key=errors.__getitem__)


def obs_scores(W: Tensor, H: Tensor, damping: float = 0.01) -> Tensor:
    """How much the loss grows when one weight is removed and the others compensate: `w^2 / (H^-1)_jj`.

    Hassibi and Stork, "Second order derivatives for network pruning" (1993).
    """
    U = inverse_factor(H, damping)
    return W.square() / U.square().sum(-2)[:, None]


def sparse_gpt_scores(
    W: Tensor, H: Tensor, ratio: float, pattern: tuple[int, int] | None, block_size: int = 128
) -> Tensor:
    """Scores of which the lowest are the weights that SparseGPT removes: Frantar and Alistarh (2023), algorithm 1.

    From the first column to the last, a weight's score is `w^2 / U_jj^2` (`H^-1 = U^T U`) at its turn, when the later
    columns have compensated for the removed ones. `ratio` is removed of each block of columns, or, with
    `pattern` (n, m), all but n of every m columns of each row. Removed weights have lower scores than kept ones.
    """
    U = inverse_factor(H)
    rest, scores, removed = W.clone(), torch.empty_like(W), torch.zeros_like(W, dtype=torch.bool)
    columns = W.shape[-1]
    if pattern is not None:
        block_size = max(1, block_size // pattern[1]) * pattern[1]
    for start in range(0, columns, block_size):
        stop = min(start + block_size, columns)
        own, factor = rest[..., start:stop].clone(), U[:, start:stop, start:stop]
        diagonal = factor.diagonal(dim1=-2, dim2=-1)[:, None]
        errors = torch.zeros_like(own)
        gone = torch.zeros(own.shape, dtype=torch.bool, device=own.device)  # contiguous, unlike `own`: for `view`
        if pattern is None:
            found = own.square() / diagonal.square()
            scores[..., start:stop] = found
            count = round(ratio * found.numel())
            gone.view(-1)[found.flatten().sort(stable=True).indices[:count]] = True
        for column in range(stop - start):
            if pattern is not None and column % pattern[1] == 0:
                here = slice(column, column + pattern[1])
                found = own[..., here].square() / diagonal[..., here].square()
                scores[..., start:stop][..., here] = found
                if found.shape[-1] == pattern[1]:  # a remainder stays whole
                    order = found.sort(dim=-1, stable=True).indices
                    gone[..., here] = torch.zeros_like(found).scatter_(-1, order[..., : -pattern[0]], 1.0).bool()
            error = torch.where(gone[..., column], own[..., column], 0.0) / factor[:, column, column, None]
            own[..., column:] -= error[..., None] * factor[:, None, column, column:]
            errors[..., column] = error
        rest[..., stop:] -= errors @ U[:, start:stop, stop:]
        removed[..., start:stop] = gone
    return torch.where(removed, scores, scores + scores.max() + 1)


def _shared_columns(M: Tensor) -> Tensor | None:
    """The columns `(groups, columns)` kept by every row that keeps any; None if rows differ."""
    columns = M.any(1)
    is_dead = ~M.any(-1)
    return columns if bool(((columns[:, None] == M).all(-1) | is_dead).all()) else None


def _solve(matrix: Tensor, wanted: Tensor, columns: Tensor) -> Tensor:
    # A removed column gets the row and the column of the identity: its value is 0, without effect on the others.
    both = columns[:, :, None] & columns[:, None, :]
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    factor = torch.linalg.cholesky(torch.where(both, matrix, identity))
    return torch.cholesky_solve((wanted * columns[:, None]).mT, factor).mT


def _descend(matrix: Tensor, wanted: Tensor, M: Tensor, start: Tensor) -> Tensor:
    V = start.clone()
    inverse = 1 / matrix.diagonal(dim1=-2, dim2=-1)[:, None]
    residual = (wanted - V @ matrix) * M
    direction = residual * inverse
    energy = (residual * direction).sum(-1, keepdim=True)
    first, tiny = energy.clone(), torch.finfo(matrix.dtype).tiny
    for _ in range(_MOST_STEPS):
        if bool((energy <= _TOLERANCE * first).all()):
            break
        moved = (direction @ matrix) * M
        step = energy / (direction * moved).sum(-1, keepdim=True).clamp_min(tiny)
        V += step * direction
        residual -= step * moved
        scaled = residual * inverse
        now = (residual * scaled).sum(-1, keepdim=True)
        direction = scaled + now / energy.clamp_min(tiny) * direction
        energy = now
    return V
