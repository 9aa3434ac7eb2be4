"""Second moments of a layer's input, and the factor of their inverse that GPTQ, SparseGPT and OBS work with.

The squared error of a linear layer's output is quadratic in its weight, with the Hessian `2 H`, `H = X^T X / n`: one
matrix for all rows of the weight, one per group of a grouped convolution. Shapes: `(groups, columns, columns)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import CalibrationError

# How often the damping is raised tenfold for a matrix that has no Cholesky factor yet.
_NUM_ATTEMPTS = 12


class InputMoments:
    """Means and second moments of a layer's input, gathered over batches: mergeable, and never larger than `columns^2`.

    `inputs`: what the layer reads now. `originals`: what it reads in the float model, row by row; if they are given,
    `cross = X_original^T X / n` is gathered too. Products are computed in `dtype`, and summed in float64.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype, self.num_rows = dtype, 0
        self._sums: dict[str, Tensor] = {}

    def add(self, inputs: Tensor, originals: Tensor | None = None) -> None:
        """Count rows: `(groups, rows, columns)`, or `(rows, columns)` for one group."""
        x = self._rows(inputs)
        if originals is not None and originals.shape != inputs.shape:
            raise CalibrationError(
                f"inputs of shape {tuple(inputs.shape)} beside originals of shape {tuple(originals.shape)}: both "
                "need the same shape"
            )
        if self._sums and self.has_originals != (originals is not None):
            raise CalibrationError("originals were given for some rows and not for others; give them for all or none")
        parts = {"hessian": x.mT @ x, "mean": x.sum(1, dtype=torch.float64)}
        if originals is not None:
            other = self._rows(originals)
            parts |= {"cross": other.mT @ x, "original_mean": other.sum(1, dtype=torch.float64)}
        self._count(x.shape[1], parts)

    def merge(self, other: InputMoments) -> None:
        """Count what another one counted, as of another process."""
        if other._sums:
            self._count(other.num_rows, other._sums)

    def state(self) -> dict[str, Any]:
        """What `from_state` makes it again from, on the CPU."""
        sums = {name: value.cpu() for name, value in self._sums.items()}
        return {"dtype": self.dtype, "num_rows": self.num_rows, "sums": sums}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device | str = "cpu") -> InputMoments:
        moments = cls(state["dtype"])
        moments._count(state["num_rows"], {name: value.to(device) for name, value in state["sums"].items()})
        return moments

    @property
    def has_originals(self) -> bool:
        return "cross" in self._sums

    @property
    def is_finite(self) -> bool:
        """Whether no input that was counted has NaN or infinity."""
        return all(bool(part.isfinite().all()) for part in self._sums.values())

    @property
    def mean(self) -> Tensor:
        """`(groups, columns)`."""
        return self._sum("mean") / self.num_rows

    @property
    def original_mean(self) -> Tensor:
        """The float input's, `(groups, columns)`."""
        return self._sum("original_mean") / self.num_rows

    def hessian(self, *, centered: bool = False) -> Tensor:
        """`X^T X / n`; centered: the covariance, for a layer whose bias absorbs the mean error."""
        found = self._sum("hessian") / self.num_rows
        found = (found + found.mT) / 2  # a product in float32 is symmetric up to rounding only
        return found - _outer(self.mean, self.mean) if centered else found

    def cross(self, *, centered: bool = False) -> Tensor:
        """`X_original^T X / n`, or the covariance of the two."""
        found = self._sum("cross") / self.num_rows
        return found - _outer(self.original_mean, self.mean) if centered else found

    def _rows(self, x: Tensor) -> Tensor:
        x = x.detach().to(self.dtype)
        x = x[None] if x.ndim == 2 else x
        if x.ndim != 3:
            raise CalibrationError(
                f"inputs of shape {tuple(x.shape)}; allowed: (rows, columns), (groups, rows, columns)"
            )
        return x

    def _sum(self, name: str) -> Tensor:
        if not self.num_rows:
            raise CalibrationError("no input was counted; give at least one batch with at least one row")
        if name not in self._sums:
            raise CalibrationError("no originals were counted; give them to add()")
        return self._sums[name]

    def _count(self, num_rows: int, parts: dict[str, Tensor]) -> None:
        if self._sums and self._sums.keys() != parts.keys():
            raise CalibrationError("originals were given for some rows and not for others; give them for all or none")
        self.num_rows += num_rows
        for name, part in parts.items():
            if name in self._sums:
                self._sums[name] += part
            else:
                self._sums[name] = part.to(torch.float64, copy=True)


def damped(hessian: Tensor, damping: float) -> Tensor:
    """`H + damping * mean(diagonal) * I`; a dead column (its input was always zero) gets 1 on the diagonal.

    The mean is that of the columns that are not dead.
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    live = diagonal > 0
    mean = (diagonal * live).sum(-1, keepdim=True) / live.sum(-1, keepdim=True).clamp(min=1)
    return hessian + torch.diag_embed(torch.where(live, damping * mean, 1.0 - diagonal))


def inverse_factor(hessian: Tensor, damping: float = 0.01) -> Tensor:
    """The upper triangular `U` with `(H + damping)^-1 = U^T U`, for each group.

    Where fewer rows were counted than there are columns `H` is singular, and `damping` makes it invertible. If it is
    too small for that, it is raised tenfold, and again, for the groups that need it alone.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise CalibrationError("the second moments of a layer's input are not finite; an input has NaN or infinity")
    # With the order of the columns reversed, H = L L^T gives H = A A^T with A upper triangular, and U = A^-1: one
    # factorization, instead of one of H and one of its inverse.
    used = damping
    matrix = damped(hessian, used).flip(-2, -1)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    for _ in range(_NUM_ATTEMPTS):
        if not bool(failed.any()):
            break
        used = max(10 * used, 1e-8)
        bad = failed > 0
        matrix = torch.where(bad[..., None, None], damped(hessian, used).flip(-2, -1), matrix)
        factor, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed.any()):
        raise CalibrationError("the second moments of a layer's input are not positive semidefinite")
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    inverse: Tensor = torch.linalg.solve_triangular(factor.flip(-2, -1), identity, upper=True)
    return inverse


def activation_order(hessian: Tensor) -> Tensor:
    """The columns of each group from the largest second moment to the smallest, `(groups, columns)`; ties in order."""
    return hessian.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left[..., :, None] * right[..., None, :]
