"""Layers, adds, products and means that a runtime executes in integers, simulated with the kernels' own arithmetic.

In eval mode the values are equal to those of the integer kernels, bit by bit: those of ONNX Runtime
(`numerics/integer_kernels.py`) or of XNNPACK (`numerics/xnnpack_kernels.py`; the classes `Xnnpack*`). In training,
under a compiler and in an export the ops are plain fake-quant: the difference is far below the noise of training.
Gradients are always those of the plain op (`with_gradient_of`).

The modules refer to quantizers that other modules own; `building/attach_integer_ops.py` connects them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparsebit.numerics import integer_kernels, xnnpack_kernels
from sparsebit.quantization.quantizers.base import Quantizer

# Integers up to 2^24 are exact in float32; half of that leaves room for intermediate sums.
LARGEST_EXACT = float(1 << 23)


class IntegerKernel(nn.Module):
    """Holds quantizers that are registered elsewhere; active in eval mode while all of them are on."""

    def __init__(self, *quantizers: Quantizer) -> None:
        super().__init__()
        self.sources = quantizers  # a tuple, so that they are not registered here: they are children of other modules

    @property
    def is_active(self) -> bool:
        return (
            not self.training
            and all(quantizer.is_enable for quantizer in self.sources)
            and not torch.compiler.is_compiling()
            and not any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))  # sums in half precision
        )

    def extra_repr(self) -> str:
        return ", ".join(quantizer.name for quantizer in self.sources)

    def exact(self, kernel: Callable[..., Tensor], plain: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """The value of `kernel` for two tensors, with the gradient of the plain one."""
        with torch.no_grad():
            scales, zero_points = zip(*(quantizer.qparams() for quantizer in self.sources), strict=True)
            found = kernel(left, right, scales, zero_points)
        return with_gradient_of(plain, found)


class IntegerLayer(IntegerKernel):
    """conv, linear or addmm: exact sums of codes, the int32 bias, one multiplication, one rounding."""

    def __init__(self, input_quantizer: Quantizer, weight_quantizer: Quantizer, output: Quantizer | None) -> None:
        super().__init__(input_quantizer, weight_quantizer, *([output] if output is not None else []))

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, channel_axis: int, compute: Callable[..., Tensor]
    ) -> Tensor:
        """`x`, `weight` and `bias` on their grids; `compute(x, weight)` is the layer without its bias."""
        input_scale, weight_scale, *output = (q.qparams()[0].detach().to(x) for q in self.sources)
        wide_scale = _along(weight_scale, weight.ndim, self.sources[1].spec.granularity.axis or 0)
        codes = integer_kernels.codes_from_zero(x, input_scale)
        weight_codes = integer_kernels.codes_from_zero(weight, wide_scale)
        sums = compute(codes, weight_codes)
        if sums.numel() and sums.abs().max() >= LARGEST_EXACT:
            sums = compute(codes.double(), weight_codes.double()).round_().to(x.dtype)
        else:
            sums.round_()  # torch may run an algorithm that is inexact on integers (Winograd), but by less than 0.5
        step = _along(input_scale * weight_scale, sums.ndim, channel_axis)
        if bias is not None:
            sums.add_(torch.div(_along(bias, sums.ndim, channel_axis), step).round_())
        if not output:
            return sums.mul_(step)
        return integer_kernels.requantized(sums, step / output[0], output[0])


class IntegerAdd(IntegerKernel):
    """An addition of two quantized tensors whose sum is quantized; `op`: the function, or the name of a method."""

    KERNEL: ClassVar[Callable[..., Tensor]] = staticmethod(integer_kernels.add)

    def __init__(self, op: Any, left: Quantizer, right: Quantizer, output: Quantizer) -> None:
        super().__init__(left, right, output)
        self.op = op

    def forward(self, left: Any, right: Any) -> Any:
        plain = getattr(left, self.op)(right) if isinstance(self.op, str) else self.op(left, right)
        if not self.is_active or left.dtype != torch.float32 or not self.has_kernel(left, right):
            return plain
        return self.exact(self.KERNEL, plain, left, right)

    def has_kernel(self, left: Tensor, right: Tensor) -> bool:
        return left.shape == right.shape


class IntegerProduct(IntegerAdd):
    """A quantized product of two quantized tensors in the graph: a gate of squeeze and excitation."""

    KERNEL: ClassVar[Callable[..., Tensor]] = staticmethod(integer_kernels.multiply)

    def has_kernel(self, left: Tensor, right: Tensor) -> bool:
        return left.dtype == right.dtype


class XnnpackAdd(IntegerAdd):
    """An addition in XNNPACK, which broadcasts; none where its scales are too far apart for its fixed point."""

    KERNEL = staticmethod(xnnpack_kernels.add)

    def has_kernel(self, left: Tensor, right: Tensor) -> bool:
        first, second, output = (float(quantizer.qparams()[0]) for quantizer in self.sources)
        ratio = max(first, second) / output
        return left.dtype == right.dtype and xnnpack_kernels.SMALLEST_RATIO <= ratio < xnnpack_kernels.LARGEST_RATIO


class XnnpackProduct(IntegerProduct):
    """A quantized product of two quantized tensors in XNNPACK."""

    KERNEL = staticmethod(xnnpack_kernels.multiply)


class XnnpackMean(IntegerKernel):
    """The quantized mean over the images of a quantized tensor.

    `pool`: the op, a module, a function or a method's name. `replaced`: the node's kind and target, before this module
    took its place.
    """

    def __init__(self, pool: Any, source: Quantizer, output: Quantizer, replaced: tuple[str, Any]) -> None:
        super().__init__(source, output)
        self.pool, self.replaced = (pool,), replaced  # in a tuple: a module of the model stays registered there alone

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        (pool,) = self.pool
        plain = getattr(x, pool)(*args, **kwargs) if isinstance(pool, str) else pool(x, *args, **kwargs)
        is_mean = x.ndim == 4 and plain.shape[-2:] == (1, 1)
        if not self.is_active or not is_mean or x.dtype != torch.float32:
            return plain
        with torch.no_grad():
            (scale, _), (output_scale, _) = (quantizer.qparams() for quantizer in self.sources)
            found = xnnpack_kernels.image_mean(x, scale, output_scale)
        return with_gradient_of(plain, found)


class IntegerMultiply(IntegerKernel):
    """A quantized product of two quantized tensors, `left`, `right` and `output`."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        plain = left * right
        if not self.is_active or left.dtype != torch.float32:
            return plain
        return self.exact(integer_kernels.multiply, plain, left, right)


class IntegerHardSigmoid(IntegerKernel):
    """A quantized hard sigmoid of a quantized tensor: `(x + 3) / 6`, which saturation clips.

    The runtime has no integer kernel for it, but one for `x + 3`, whose result on a six times coarser grid has the
    codes of the gate. See `deploy.hard_sigmoid_layout`. The quantizers: of `x` and of the gate.
    """

    def forward(self, x: Tensor) -> Tensor:
        plain = nn.functional.hardsigmoid(x)
        source, gate = self.sources
        if not self.is_active or x.dtype != torch.float32 or not self.has_kernel():
            return plain
        with torch.no_grad():
            (scale, zero_point), (gate_scale, gate_zero) = source.qparams(), gate.qparams()
            three = torch.full((), 3.0, device=x.device)
            coarse = gate_scale * 6
            added = integer_kernels.add(
                x, three, (scale, three, coarse), (zero_point, torch.zeros_like(gate_zero), gate_zero)
            )
            codes = integer_kernels.codes_from_zero(added, coarse)
        return with_gradient_of(plain, codes * gate_scale)

    def has_kernel(self) -> bool:
        """Whether saturation to the gate's type clips at 0 and 1, as a hard sigmoid does."""
        scale, zero_point = self.sources[1].qparams()
        spec = self.sources[1].spec
        return (
            all(quantizer.spec.granularity.kind == "tensor" for quantizer in self.sources)
            and spec.bits == 8
            and integer_kernels.saturates_as_hard_sigmoid(float(scale), float(zero_point), spec.qmin, spec.qmax)
        )


def _along(numbers: Tensor, ndim: int, axis: int) -> Tensor:
    """One number per channel, in the shape that matches a tensor of `ndim` dimensions; a single number as it is."""
    return numbers.reshape([-1 if dim == axis % ndim else 1 for dim in range(ndim)]) if numbers.ndim else numbers


def with_gradient_of(plain: Tensor, exact: Tensor) -> Tensor:
    """The exact value; backward goes through the plain one."""
    return plain + (exact - plain).detach() if plain.requires_grad else exact
