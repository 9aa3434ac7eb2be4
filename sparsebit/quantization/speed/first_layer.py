"""`first_layer`: a convolution whose input needs no gradient (a model's images), without computing that gradient.

Only the learned scale of the images would need the gradient of the convolution's input, and with three channels that is
the slowest kernel of a training step. It can be avoided: with t = dy/dscale of every quantized number y, and g the
gradient of the convolution's output,

    dL/dscale = <conv_input_grad(g, w), t> = <conv_weight_grad(g, t), w>

and the weight gradient of t costs nothing in addition to that of y, because kernels pad three channels to eight anyway.
A convolution of patches that do not overlap is a matrix product, forward and backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.numerics.fake_quant.gradients import LEARNING, Gradient, lsq_factor
from sparsebit.numerics.fake_quant.operator import grid_of, is_exporting
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.speed.below_autograd import slopes
from sparsebit.quantization.speed.recomputation import autocast_dtype

# Up to so many input channels a convolution's kernels take as long as with one. On a CPU each channel costs time.
FREE_CHANNELS = {"cuda": 8}


def first_layer(
    op: nn.Module, quantizer: Quantizer, x: Tensor, weight: Tensor, bias: Tensor | None, gradient: Gradient
) -> Tensor | None:
    """`op` on the quantized `x`, which needs no gradient; None if this way saves nothing."""
    if x.requires_grad or not isinstance(op, nn.Conv2d) or op.groups != 1 or is_exporting():
        return None
    scale, zero_point = quantizer.operands()
    learned = [number for number in (scale, zero_point) if number.requires_grad]
    if gradient not in LEARNING or not learned or scale.numel() != 1 or x.ndim != 4 or x.dtype == torch.float64:
        return None
    if _is_of_patches(op, x):
        return _of_patches(op, quantizer(x), weight, bias) if gradient == quantizer.GRADIENT else None
    if x.shape[1] * (1 + len(learned)) > FREE_CHANNELS.get(x.device.type, 0):
        return None
    return _with_slopes(op, quantizer, x, weight, bias, gradient)


def _is_of_patches(op: nn.Conv2d, x: Tensor) -> bool:
    steps_by_patches = op.stride == op.kernel_size and not isinstance(op.padding, str) and not any(op.padding)
    fits = all(size % patch == 0 for size, patch in zip(x.shape[2:], op.kernel_size, strict=True))
    return steps_by_patches and fits and op.dilation == (1, 1)


def _of_patches(op: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (height, width), (rows, columns) = op.kernel_size, x.shape[2:]
    # A patch in the order (row, column, channel): then rows of channels-last images are copied in one piece.
    patches = x.unflatten(3, (columns // width, width)).unflatten(2, (rows // height, height)).permute(0, 2, 4, 3, 5, 1)
    y = F.linear(patches.flatten(3), weight.permute(0, 2, 3, 1).flatten(1), bias)
    return y.permute(0, 3, 1, 2)


def _with_slopes(
    op: nn.Conv2d, quantizer: Quantizer, x: Tensor, weight: Tensor, bias: Tensor | None, gradient: Gradient
) -> Tensor:
    """Append the slopes as further channels, with zero weights whose gradients are those of scale and zero point."""
    numbers, spec = quantizer.operands(), quantizer.spec
    needs = (numbers[0].requires_grad, numbers[1].requires_grad)
    with torch.no_grad():
        quantized, derivatives = slopes(x, *numbers, grid_of(spec), gradient, needs, quantizer.name)
    factor = 1.0 if gradient == "pact" else lsq_factor(x.numel(), 1, spec.qmax)
    # Zeros with a gradient: the further channels add nothing to the output, and the gradient of their weights, times
    # the weight, becomes the gradient of scale and zero point.
    zeros = [((n - n.detach()) * factor).reshape(()) for n, needed in zip(numbers, needs, strict=True) if needed]
    fixed = weight.detach().float()
    weights = [weight, *((fixed * zero).to(weight.dtype) for zero in zeros)]
    dtype = autocast_dtype(x.device.type) or x.dtype
    images = [image.to(dtype) for image in (quantized, *derivatives)]
    output: Tensor = op._conv_forward(torch.cat(images, 1), torch.cat(weights, 1), bias)
    return output
