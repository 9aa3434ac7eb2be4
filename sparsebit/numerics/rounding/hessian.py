"""Second moments of a layer's input, and the factor of their inverse for GPTQ, SparseGPT and OBS.

The squared error of a linear layer's output is quadratic in its weight, with the Hessian `2 H`, `H = X^T X / n`: one
matrix for all rows of the weight, one per group of a grouped convolution. Shapes: `(groups, columns, columns)`.

A layer of 14336 columns has 1.6 GB of moments in float64, so the functions whose names end in `_` work in the memory
of their argument, and in blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import CalibrationError

# How often the damping is raised tenfold for a matrix without a Cholesky factor.
_NUM_ATTEMPTS = 12
# Columns of a matrix that are processed at a time, to save memory.
_BLOCK = 512
_FACTOR_BLOCK = 2048


class InputMoments:
    """Means and second moments of a layer's input, gathered over batches: mergeable, and never larger than `columns^2`.

    `inputs`: the layer's current inputs. `originals`: its inputs in the float model, row by row; if they are given,
    `cross = X_original^T X / n` is gathered too. Products are computed in `dtype`, and summed in float64. On a GPU,
    inputs in half precision are multiplied directly, with float32 sums: the same numbers, many times faster.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype, self.num_rows, self.total = dtype, 0, 0.0
        self._sums: dict[str, Tensor] = {}

    def add(self, inputs: Tensor, originals: Tensor | None = None, weight: float = 1.0) -> None:
        """Count rows: `(groups, rows, columns)`, or `(rows, columns)` for one group. `weight`: how much each counts."""
        x = self._rows(inputs)
        assert originals is None or originals.shape == inputs.shape, "originals need the shape of the inputs"
        assert not self._sums or self.has_originals == (originals is not None), "originals for all rows or for none"
        rows, total = x.shape[1], weight * x.shape[1]
        self._count(rows, total, {"hessian": self._product(x, x), "mean": x.sum(1, dtype=torch.float64)}, weight)
        if originals is not None:  # one large product at a time
            other = self._rows(originals)
            sums = {"cross": self._product(other, x), "original_mean": other.sum(1, dtype=torch.float64)}
            self._count(0, 0.0, sums, weight)

    def merge(self, other: InputMoments) -> None:
        """Add the counts of another one, for example of another process."""
        if other._sums:
            assert not self._sums or self.has_originals == other.has_originals, "originals for all rows or for none"
            self._count(other.num_rows, other.total, other._sums)

    def state(self) -> dict[str, Any]:
        """The state that `from_state` restores, on the CPU."""
        sums = {name: value.cpu() for name, value in self._sums.items()}
        return {"dtype": self.dtype, "num_rows": self.num_rows, "total": self.total, "sums": sums}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device | str = "cpu") -> InputMoments:
        moments = cls(state["dtype"])
        sums = {name: value.to(device) for name, value in state["sums"].items()}
        moments._count(state["num_rows"], state.get("total", state["num_rows"]), sums)
        return moments

    @property
    def has_originals(self) -> bool:
        return "cross" in self._sums

    @property
    def is_finite(self) -> bool:
        """Whether no counted input had NaN or infinity."""
        return all(bool(part.isfinite().all()) for part in self._sums.values())

    @property
    def mean(self) -> Tensor:
        """`(groups, columns)`."""
        return self._sum("mean") / self.total

    @property
    def original_mean(self) -> Tensor:
        """The float input's, `(groups, columns)`."""
        return self._sum("original_mean") / self.total

    def hessian(self, *, centered: bool = False) -> Tensor:
        """`X^T X / n`; centered: the covariance, for a layer whose bias absorbs the mean error."""
        found = _symmetric_(self._sum("hessian") / self.total)
        return found - _outer(self.mean, self.mean) if centered else found

    def cross(self, *, centered: bool = False) -> Tensor:
        """`X_original^T X / n`, or the covariance of the two."""
        found = self._sum("cross") / self.total
        return found - _outer(self.original_mean, self.mean) if centered else found

    def take(self) -> tuple[Tensor, Tensor | None]:
        """`hessian()` and, if originals were given, `cross()`, in the memory of the sums, which are then gone.

        A layer of 14336 columns has 1.6 GB of each.
        """
        found = _symmetric_(self._sum("hessian").div_(self.total))
        cross = self._sums["cross"].div_(self.total) if self.has_originals else None
        self.num_rows, self.total, self._sums = 0, 0.0, {}
        return found, cross

    def _rows(self, x: Tensor) -> Tensor:
        x = x.detach()
        if not (x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and self.dtype is torch.float32):
            x = x.to(self.dtype)
        assert x.ndim in (2, 3), "allowed: (rows, columns), (groups, rows, columns)"
        return x[None] if x.ndim == 2 else x

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """`left^T right` in `dtype`. The product of two half-precision numbers is exact in float32."""
        if left.dtype == right.dtype != self.dtype:
            return torch.bmm(left.mT, right, out_dtype=self.dtype)
        return left.to(self.dtype).mT @ right.to(self.dtype)

    def _sum(self, name: str) -> Tensor:
        if not self.num_rows:
            raise CalibrationError("no input was counted; at least one batch with at least one row is required")
        return self._sums[name]

    def _count(self, num_rows: int, total: float, parts: dict[str, Tensor], weight: float = 1.0) -> None:
        self.num_rows += num_rows
        self.total += total
        for name, part in parts.items():
            if name in self._sums:
                self._sums[name].add_(part, alpha=weight)
            else:
                self._sums[name] = part.to(torch.float64, copy=True).mul_(weight)


def damped(hessian: Tensor, damping: float) -> Tensor:
    """`H + damping * mean(live diagonal) * I`; a dead column (its input was always zero) gets 1 on the diagonal."""
    return _damp_(hessian.clone(), damping)


def _damp_(hessian: Tensor, damping: float) -> Tensor:
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    live = diagonal > 0
    mean = (diagonal * live).sum(-1, keepdim=True) / live.sum(-1, keepdim=True).clamp(min=1)
    diagonal += torch.where(live, damping * mean, 1.0)
    return hessian


def inverse_factor(hessian: Tensor, damping: float = 0.01, order: Tensor | None = None) -> Tensor:
    """The upper triangular `U` with `(H + damping)^-1 = U^T U`, for each group.

    `order (groups, columns)`: of the columns; default: that of `hessian`.
    If fewer rows were counted than there are columns, `H` is singular, and `damping` makes it invertible. If it is
    too small for that, it is raised tenfold, repeatedly, only for the groups that need it.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise CalibrationError("the second moments of a layer's input are not finite; an input has NaN or infinity")
    # H = A A^T with A upper triangular, so U = A^-1. That is one factorization; GPTQ's paper factors H and its inverse.
    used = damping
    factor, failed = _factored_(_damp_(_ordered(hessian, order), used))
    for _ in range(_NUM_ATTEMPTS):
        if not bool(failed.any()):
            break
        used = max(10 * used, 1e-8)
        again, still = _factored_(_damp_(_ordered(hessian[failed], None if order is None else order[failed]), used))
        factor[failed] = again
        failed[failed.clone()] = still
    if bool(failed.any()):
        raise CalibrationError("the second moments of a layer's input are not positive semidefinite")
    return _inverse_of_upper_(factor)


def _factored_(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The upper triangular `A` with `A A^T = matrix`, in its memory, and for each group whether there is none.

    From the last columns to the first, in blocks: torch's own function needs the memory of three more matrices.
    """
    size = matrix.shape[-1]
    failed = torch.zeros(len(matrix), dtype=torch.bool, device=matrix.device)
    for start in reversed(range(0, size, _FACTOR_BLOCK)):
        stop = min(start + _FACTOR_BLOCK, size)
        # Reversing rows and columns turns the lower triangular factor of `cholesky_ex` into an upper triangular one.
        own, info = torch.linalg.cholesky_ex(matrix[:, start:stop, start:stop].flip(-2, -1))
        own = own.flip(-2, -1)
        failed |= info != 0
        matrix[:, start:stop, start:stop] = own
        matrix[:, start:stop, :start] = 0
        if start:
            above = torch.linalg.solve_triangular(own.mT, matrix[:, :start, start:stop], upper=False, left=False)
            matrix[:, :start, start:stop] = above
            matrix[:, :start, :start].baddbmm_(above, above.mT, alpha=-1)
    return matrix, failed


def _inverse_of_upper_(matrix: Tensor) -> Tensor:
    """The inverse of an upper triangular matrix, in its memory, in blocks of columns.

    That of `[A B; 0 C]` is `[A^-1 D; 0 C^-1]` with `D = -A^-1 B C^-1`.
    """
    size = matrix.shape[-1]
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        identity = torch.eye(stop - start, dtype=matrix.dtype, device=matrix.device).expand(len(matrix), -1, -1)
        own = torch.linalg.solve_triangular(matrix[:, start:stop, start:stop], identity, upper=True)
        matrix[:, start:stop, start:stop] = own
        if start:
            above = matrix[:, :start, :start] @ matrix[:, :start, start:stop]
            matrix[:, :start, start:stop] = -(above @ own)
    return matrix


def _ordered(hessian: Tensor, order: Tensor | None) -> Tensor:
    """With the columns and the rows in the given order, as a copy; some rows at a time, to avoid a second one."""
    if order is None:
        return hessian.clone()
    found, size = torch.empty_like(hessian), hessian.shape[-1]
    for start in range(0, size, _FACTOR_BLOCK):
        own = order[:, start : start + _FACTOR_BLOCK]
        some = hessian.gather(-2, own[:, :, None].expand(-1, -1, size))
        torch.gather(some, -1, order[:, None].expand(some.shape), out=found[:, start : start + _FACTOR_BLOCK])
    return found


def _symmetric_(matrix: Tensor) -> Tensor:
    """The mean of the matrix and its transpose, in place: a product in float32 is symmetric up to rounding only."""
    for start in range(0, matrix.shape[-1], _BLOCK):
        stop = start + _BLOCK
        mean = (matrix[..., start:stop, start:] + matrix[..., start:, start:stop].mT) / 2
        matrix[..., start:stop, start:] = mean
        matrix[..., start:, start:stop] = mean.mT
    return matrix


def activation_order(hessian: Tensor) -> Tensor:
    """The columns of each group from the largest second moment to the smallest, `(groups, columns)`; ties in order."""
    return hessian.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left[..., :, None] * right[..., None, :]
