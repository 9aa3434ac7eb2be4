"""Fake-quantizes many weights at once, on a GPU: two kernels for a dozen layers, instead of dozens.

A layer's weight is small, so launching kernels dominates the cost. The weights are placed one after the other, each
row (an output channel) with its scale, and quantized in one pass; so are their gradients. Values and gradients are
those of separate layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsebit.kernels.fake_quant import Launch
from sparsebit.kernels.fake_quant_programs import backward_ragged, forward_ragged
from sparsebit.numerics.fake_quant.gradients import lsq_factor

BLOCK = 1024


@dataclass(frozen=True)
class RowForm:
    """A weight's form: rows along its first dimension, one scale each, codes from `qmin` to `qmax` around zero."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    qmin: int
    qmax: int

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    @property
    def row_size(self) -> int:
        return self.stride[0]

    @property
    def numel(self) -> int:
        return self.num_rows * self.row_size


class RowBatch:
    """The constants of a list of weights: where rows begin, and their grids."""

    def __init__(self, forms: Sequence[RowForm], device: torch.device) -> None:
        self.forms = tuple(forms)
        sizes = [form.row_size for form in forms for _ in range(form.num_rows)]
        self.starts = torch.tensor([0, *accumulate(sizes)], device=device)

        def per_row(values: list[float]) -> Tensor:
            rows = [value for form, value in zip(forms, values, strict=True) for _ in range(form.num_rows)]
            return torch.tensor(rows, dtype=torch.float32, device=device)

        self.qmins = per_row([float(form.qmin) for form in forms])
        self.qmaxs = per_row([float(form.qmax) for form in forms])
        self.factors = per_row([lsq_factor(form.numel, form.num_rows, form.qmax) for form in forms])
        self.num_rows, self.numel = len(sizes), sum(sizes)
        self.offsets = [0, *accumulate(form.numel for form in forms)]
        self._forward = Launch(forward_ragged, self.num_rows, (), (BLOCK,))
        self._backward = Launch(backward_ragged, self.num_rows, (), (BLOCK,))

    def quantized(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """`x` and `scale`: those of all weights, one after the other."""
        y = torch.empty(self.numel, dtype=dtype, device=x.device)
        self._forward((x, scale, self.starts, self.qmins, self.qmaxs, y), ())
        return y

    def gradients(self, grad: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        by_x, by_scale = torch.empty_like(x), torch.empty_like(scale)
        grids = (self.starts, self.qmins, self.qmaxs, self.factors)
        self._backward((grad, x, scale, *grids, by_x, by_scale), ())
        return by_x, by_scale

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of these forms as one, in the order of their memory."""
        pieces = []
        for form, tensor in zip(self.forms, tensors, strict=True):
            if tensor.stride() != form.stride:
                laid_out = torch.empty_strided(form.shape, form.stride, dtype=tensor.dtype, device=tensor.device)
                tensor = laid_out.copy_(tensor)
            pieces.append(tensor.as_strided((form.numel,), (1,)))
        return torch.cat(pieces)

    def views(self, flat: Tensor) -> list[Tensor]:
        each = zip(self.forms, self.offsets, strict=False)
        return [flat.as_strided(form.shape, form.stride, offset) for form, offset in each]


class _FakeQuantizeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: RowBatch, dtype: torch.dtype, learns: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, scales = tensors[: len(batch.forms)], tensors[len(batch.forms) :]
        x, scale = batch.flat(weights), torch.cat(scales)
        y = batch.quantized(x, scale, dtype)
        # x is not kept: it is made from the weights again, which exist anyway.
        ctx.save_for_backward(scale, *weights)
        ctx.batch, ctx.learns = batch, learns
        ctx.set_materialize_grads(False)
        return tuple(batch.views(y))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        batch: RowBatch = ctx.batch
        scale, *weights = ctx.saved_tensors
        known = [w.new_zeros(()).expand_as(w) if g is None else g for g, w in zip(grads, weights, strict=True)]
        grad_x, grad_scale = batch.gradients(batch.flat(known), batch.flat(weights), scale)
        by_weight: list[Tensor | None] = [*batch.views(grad_x)]
        by_scale: list[Tensor | None] = [*grad_scale.split([form.num_rows for form in batch.forms])]
        for number, found in enumerate(grads):  # a layer that the loss does not depend on has no gradient
            if found is None:
                by_weight[number] = by_scale[number] = None
        return (None, None, None, *by_weight, *(by_scale if ctx.learns else [None] * len(grads)))


_apply: Callable[..., tuple[Tensor, ...]] = _FakeQuantizeRows.apply


def fake_quantize_rows(
    batch: RowBatch, weights: Sequence[Tensor], scales: Sequence[Tensor], dtype: torch.dtype, *, learns: bool
) -> tuple[Tensor, ...]:
    """Each weight on its grid, in `dtype`; `learns`: gradients go to the scales too (LSQ)."""
    return _apply(batch, dtype, learns, *weights, *scales)
