"""Scales and zero points from ranges, the shapes in which they broadcast against a tensor, and checks on them.

Scales and zero points are flat float32 tensors with one number per row of `spec.to_rows`, or one number for all;
`broadcast_to` adds the tensor's dimensions. Rows are defined by the granularity in `spec`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsebit.backends import BACKENDS
from sparsebit.errors import BackendError, CalibrationError, SpecError
from sparsebit.numerics.spec import Granularity, TensorSpec, axis_in, num_rows, scale_shape

# The smallest scale: subnormal numbers are flushed to zero by many devices, and x / 0 has no code.
QParams = tuple[Tensor, Tensor]  # scales and zero points
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def qparams_from_range(min_val: Tensor, max_val: Tensor, spec: TensorSpec, *, check: bool = True) -> QParams:
    """Scale and zero point (float32, the shape of `min_val`) of the grid that holds `[min_val, max_val]` and zero.

    symmetric: `scale = max(min/qmin, max/qmax)`, the smallest that clips neither end; zero point 0.
    affine:    `scale = (max - min) / (qmax - qmin)`, `zero_point = clamp(round(qmin - min/scale), qmin, qmax)`.

    Zero is always a point of the grid. The empty range [0, 0] has scale 1 and zero point 0. One symmetric bit has no
    positive code: its scale is the lower end. `check=False` skips the check of the values, which waits for a GPU.
    """
    if min_val.shape != max_val.shape:
        raise SpecError(f"range of shapes {tuple(min_val.shape)} and {tuple(max_val.shape)}: give both ends the same")
    # float64: max - min of two finite float32 may overflow, and the scale is then the correctly rounded one.
    low, high = min_val.detach().to(torch.float64), max_val.detach().to(torch.float64)
    if check:
        # One test, hence one device synchronisation, on the good path; NaN fails the comparison too.
        good = (low <= high) & torch.isfinite(low) & torch.isfinite(high)
        if not bool(good.all()):
            raise CalibrationError(
                f"range [{_first(low, ~good):g}, {_first(high, ~good):g}] in {int((~good).sum())} of {good.numel()} "
                "rows: both ends must be finite and in order; look for NaN or infinity in the weights and in the "
                "calibration data"
            )
    low, high = low.clamp(max=0), high.clamp(min=0)
    if not spec.symmetric:
        scale = (high - low) / (spec.qmax - spec.qmin)
    elif spec.qmax:
        scale = torch.maximum(low / spec.qmin, high / spec.qmax)
    else:
        scale = torch.where(low < 0, -low, high)
    scale = torch.where(scale > 0, scale.clamp(SMALLEST_SCALE, torch.finfo(torch.float32).max), 1.0).to(torch.float32)
    if spec.symmetric:
        return scale, torch.zeros_like(scale)
    zero_point = (spec.qmin - low / scale).round_().clamp_(spec.qmin, spec.qmax)
    return scale, zero_point.to(torch.float32)


def dequantized_range(scale: Tensor, zero_point: Tensor, spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """The lowest and the highest value on the grid: `((qmin - zp) * scale, (qmax - zp) * scale)`."""
    zero_point = zero_point.round()
    return (spec.qmin - zero_point) * scale, (spec.qmax - zero_point) * scale


def broadcast_to(param: Tensor, shape: Sequence[int], granularity: Granularity) -> Tensor:
    """`param` (one number per row, or one for all) in a form that broadcasts against a tensor of this shape.

    PerTensor: `()`. PerChannel(1) of `(N, C, H, W)`: `(1, C, 1, 1)`. PerGroup: each number repeated over its group, so
    that `(4096, 8)` scales match `(4096, 1000)` as `(4096, 1000)`.
    """
    if param.numel() == 1:
        return param if param.ndim == 0 else param.reshape(())
    check_num_params(param.numel(), shape, granularity)
    assert granularity.axis is not None, "more than one row without an axis"
    axis = axis_in(granularity, len(shape))
    if granularity.size == 0:
        return param.reshape([-1 if dim == axis else 1 for dim in range(len(shape))])
    unfolded = param.reshape(scale_shape(shape, granularity))
    return unfolded.repeat_interleave(granularity.size, axis).narrow(axis, 0, shape[axis])


def check_num_params(num_params: int, shape: Sequence[int], granularity: Granularity) -> None:
    """Raise for scales or zero points that are neither one nor one per row of the tensor."""
    expected = num_rows(shape, granularity)
    if num_params not in (1, expected):
        allowed = "1" if expected == 1 else f"1 or {expected}"
        raise SpecError(
            f"{num_params} scales or zero points for a tensor of shape {tuple(shape)} with {granularity}: "
            f"allowed: {allowed}; calibrate again if the tensor's shape has changed"
        )


def check_backend(spec: TensorSpec, zero_point: Tensor, backend: str, site: str) -> None:
    """Raise for numbers that `backend` cannot run for any kind of tensor; the message contains the site's name."""
    if backend not in BACKENDS:
        raise BackendError(f"backend {backend!r} at {site}: allowed: {', '.join(BACKENDS)}")
    # The kind of tensor is not known here, so any of the three rules may allow the format.
    rules = [getattr(BACKENDS[backend], name) for name in ("weight", "activation", "weight_only")]
    if not any(
        spec.bits in rule.bits
        and spec.granularity.kind in rule.granularities
        and spec.symmetric in rule.symmetric
        and spec.format in rule.formats
        for rule in rules
    ):
        scheme = f"per-{spec.granularity.kind}-{'symmetric' if spec.symmetric else 'affine'}"
        advice = "; ".join(dict.fromkeys(rule.advice for rule in rules))
        number = "fp8" if spec.format == "float8" else f"{spec.bits}-bit"
        raise BackendError(f"{number} {scheme} at {site}: {advice}; or set BACKEND: virtual")
    if backend == "virtual":
        return
    codes = zero_point.detach().round()
    is_zero = all(rule.symmetric == {True} for rule in rules)
    low, high = (0, 0) if is_zero else (spec.qmin, spec.qmax)
    outside = (codes < low) | (codes > high)
    if bool(outside.any()):
        advice = "use a symmetric QSCHEME" if is_zero else "clamp the learned zero point"
        raise BackendError(
            f"zero point {_first(codes, outside)} at {site}: {backend} stores {spec.dtype_name} with zero points from "
            f"{low} to {high}; {advice}, or set BACKEND: virtual"
        )


def checked_qparams(scale: Tensor, zero_point: Tensor, spec: TensorSpec, num_scales: int | None, site: str) -> QParams:
    """A given scale and zero point, one of each per scale: `()` or `(num_scales,)`; raises for impossible numbers.

    `num_scales`: how many there are; None: as many as are given. A single number applies to all of them.
    """
    low, high = (0, 0) if spec.symmetric else (spec.qmin, spec.qmax)
    is_possible = bool((torch.isfinite(scale) & (scale >= SMALLEST_SCALE)).all())
    if not is_possible or not bool(((zero_point >= low) & (zero_point <= high)).all()):
        raise CalibrationError(
            f"{site}: scale from {scale.min():g}, zero point {zero_point.min():g}..{zero_point.max():g} with "
            f"{spec.dtype_name}; allowed: finite scales from {SMALLEST_SCALE:g} on, zero points {low} to {high}"
        )
    wanted = num_scales or max(scale.numel(), zero_point.numel())
    for numel in (scale.numel(), zero_point.numel()):
        if numel not in (1, wanted):
            allowed = "1" if wanted == 1 else f"1 or {wanted}"
            raise SpecError(f"{site}: {numel} scales or zero points with {spec.granularity}; allowed: {allowed}")
    shape = (wanted,) if wanted > 1 else ()
    return scale.reshape(-1).expand(wanted).reshape(shape), zero_point.reshape(-1).expand(wanted).reshape(shape)


def _first(values: Tensor, where: Tensor) -> float:
    return float(values.reshape(-1)[where.reshape(-1)][0])
