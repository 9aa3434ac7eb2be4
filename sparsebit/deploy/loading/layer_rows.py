"""Operators with weights, norms and pools: they become layers with parameters, or their functions."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.deploy.loading.call import Call
from sparsebit.deploy.loading.operator_table import operator
from sparsebit.deploy.loading.values import Value, example_of, is_constant, rank

_CONVS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED: dict[int, Any] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_CONV_FUNCTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_NORMS: dict[int, Any] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_MAX_POOLS: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOLS: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_ADAPTIVE: dict[str, dict[int, Any]] = {
    "GlobalAveragePool": {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d},
    "GlobalMaxPool": {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d},
}


def _window(call: Call, kernel: list[int]) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
    """Strides, dilations, and pads as ONNX has them: those before each axis, then those after."""
    dims = len(kernel)
    strides = tuple(call.attribute("strides", [1] * dims))
    dilations = tuple(call.attribute("dilations", [1] * dims))
    mode = call.attribute("auto_pad", "NOTSET")
    if mode == "VALID":
        return strides, dilations, [0] * 2 * dims
    if mode == "NOTSET":
        return strides, dilations, list(call.attribute("pads", [0] * 2 * dims))
    before, after = [], []
    for size, k, stride, dilation in zip(example_of(call.inputs[0]).shape[2:], kernel, strides, dilations, strict=True):
        total = max((math.ceil(size / stride) - 1) * stride + (k - 1) * dilation + 1 - size, 0)
        small, large = total // 2, total - total // 2
        before.append(small if mode == "SAME_UPPER" else large)
        after.append(large if mode == "SAME_UPPER" else small)
    return strides, dilations, before + after


def _padded(call: Call, value: Value, pads: list[int], fill: float = 0.0) -> tuple[Value, tuple[int, ...]]:
    """The input and the symmetric padding of its layer; other padding becomes a node before it."""
    dims = len(pads) // 2
    if pads[:dims] == pads[dims:]:
        return value, tuple(pads[:dims])
    pairs = [pad for axis in reversed(range(dims)) for pad in (pads[axis], pads[axis + dims])]
    return call.emit(F.pad, value, pairs, value=fill), (0,) * dims


@operator("Conv")
def _conv(call: Call) -> Value:
    value, weight, bias = call.inputs[0], call.inputs[1], call.input(2)
    kernel = list(example_of(weight).shape[2:])
    if len(kernel) not in _CONVS:
        raise call.refusal(f"a convolution over {len(kernel)} axes; torch has those over 1 to 3")
    strides, dilations, pads = _window(call, kernel)
    value, padding = _padded(call, value, pads)
    groups = call.attribute("group", 1)
    if not is_constant(weight) or not (bias is None or is_constant(bias)):
        return call.emit(_CONV_FUNCTIONS[len(kernel)], value, weight, bias, strides, padding, dilations, groups)
    settings = (tuple(kernel), strides, padding, dilations, groups)
    channels = weight.shape[1] * groups, weight.shape[0]
    layer = _CONVS[len(kernel)](*channels, *settings, bias is not None, device="meta")
    return call.layer(layer, settings, {"weight": weight, "bias": bias}, value)


@operator("FusedConv", domain="com.microsoft")
def _fused_conv(call: Call) -> Value:
    found = _conv(call)
    if call.input(3) is not None:
        found = call.emit(torch.add, found, call.inputs[3])
    name = call.attribute("activation", "")
    functions: dict[str, Any] = {"": None, "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh}
    if name not in functions:
        raise call.refusal(f"its activation {name}; allowed: Relu, Sigmoid, Tanh")
    return found if functions[name] is None else call.emit(functions[name], found)


@operator("ConvTranspose")
def _conv_transpose(call: Call) -> Value:
    value, weight, bias = call.inputs[0], call.constant(1, "weight"), call.input(2)
    kernel = list(weight.shape[2:])
    dims = len(kernel)
    if dims not in _TRANSPOSED:
        raise call.refusal(f"a transposed convolution over {dims} axes; torch has those over 1 to 3")
    strides = tuple(call.attribute("strides", [1] * dims))
    dilations = tuple(call.attribute("dilations", [1] * dims))
    extra = list(call.attribute("output_padding", [0] * dims))
    pads = list(call.attribute("pads", [0] * 2 * dims))
    wanted, mode = call.attribute("output_shape"), call.attribute("auto_pad", "NOTSET")
    if wanted is not None or mode in ("SAME_UPPER", "SAME_LOWER"):
        sizes = example_of(value).shape[2:]
        wanted = (
            [size * stride for size, stride in zip(sizes, strides, strict=True)] if wanted is None else wanted[-dims:]
        )
        full = [
            (size - 1) * s + e + (k - 1) * d + 1
            for size, s, e, k, d in zip(sizes, strides, extra, kernel, dilations, strict=True)
        ]
        total = [max(a - b, 0) for a, b in zip(full, wanted, strict=True)]
        extra = [e + max(b - a, 0) for e, a, b in zip(extra, full, wanted, strict=True)]
        halves = [t // 2 for t in total]
        others = [t - t // 2 for t in total]
        pads = halves + others if mode == "SAME_UPPER" else others + halves
    # What is cut off after the end by more than before the start is less output padding, or a slice.
    padding, cut = pads[:dims], [0] * dims
    for axis in range(dims):
        difference = pads[axis + dims] - pads[axis]
        if difference < 0:
            extra[axis] -= difference
        elif difference > 0:
            taken = min(extra[axis], difference)
            extra[axis] -= taken
            cut[axis] = difference - taken
    groups = call.attribute("group", 1)
    settings = (tuple(kernel), strides, tuple(padding), tuple(extra), groups)
    if any(e >= max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        raise call.refusal(f"its output padding {extra} is not smaller than its stride; torch has no such layer")
    channels = weight.shape[0], weight.shape[1] * groups
    layer = _TRANSPOSED[dims](*channels, *settings, bias is not None, dilations, device="meta")
    found = call.layer(layer, (*settings, dilations), {"weight": weight, "bias": bias}, value)
    for axis, count in enumerate(cut):
        if count:
            found = call.emit(_without_end, found, axis + 2, count)
    return found


def _without_end(value: Tensor, axis: int, count: int) -> Tensor:
    return value.narrow(axis, 0, value.shape[axis] - count)


@operator("Gemm")
def _gemm(call: Call) -> Value:
    left, right, added = call.inputs[0], call.inputs[1], call.input(2)
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    left = call.method("t", left) if call.attribute("transA", 0) else left
    is_transposed = bool(call.attribute("transB", 0))
    if is_constant(right) and not is_constant(left):
        weight = right if is_transposed else call.graph.named(right.t(), right)
        weight = weight if alpha == 1 else call.graph.named(weight * alpha, right)
        count = weight.shape[0]
        if added is None:
            return linear(call, left, weight, None)
        if is_constant(added) and added.numel() in (1, count) and added.numel() == added.shape[-1:].numel():
            bias = added.reshape(-1) * beta if beta != 1 else added.reshape(-1)
            return linear(call, left, weight, call.graph.named(bias.expand(count).clone(), added))
        return call.emit(torch.add, linear(call, left, weight, None), _times(call, added, beta))
    product = _times(call, call.emit(torch.matmul, left, call.method("t", right) if is_transposed else right), alpha)
    return product if added is None else call.emit(torch.add, product, _times(call, added, beta))


def _times(call: Call, value: Value, factor: float) -> Value:
    return value if factor == 1 else call.emit(torch.mul, value, factor)


def linear(call: Call, value: Value, weight: Tensor, bias: Tensor | None) -> Value:
    """An nn.Linear of the weight (out, in)."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    return call.layer(layer, "linear", {"weight": weight, "bias": bias}, value)


@operator("MatMul")
def _matmul(call: Call) -> Value:
    left, right = call.inputs
    if (
        is_constant(right)
        and right.ndim == 2
        and not is_constant(left)
        and right.is_floating_point()
        and rank(left) > 0
    ):
        return linear(call, left, call.graph.named(right.t(), right), None)
    return call.emit(torch.matmul, left, right)


@operator("MatMulAddBias", domain="sparsebit")
def _matmul_add(call: Call) -> Value:
    """A MatMul and the Add of its bias, joined by `joined_nodes`."""
    left, right, bias = call.inputs
    if is_constant(left) or not is_constant(right):
        return call.emit(torch.add, call.emit(torch.matmul, left, right), bias)
    return linear(call, left, call.graph.named(right.t(), right), call.graph.named(bias.reshape(-1), bias))


@operator("FusedMatMul", domain="com.microsoft")
def _fused_matmul(call: Call) -> Value:
    left, right = call.inputs
    left = call.emit(torch.transpose, left, -1, -2) if call.attribute("transA", 0) else left
    right = call.emit(torch.transpose, right, -1, -2) if call.attribute("transB", 0) else right
    if call.attribute("transBatchA", 0) or call.attribute("transBatchB", 0):
        raise call.refusal("transposed batches have no rule")
    return _times(call, call.emit(torch.matmul, left, right), call.attribute("alpha", 1.0))


@operator("BatchNormalization")
def _batch_norm(call: Call) -> Value:
    if call.attribute("training_mode", 0):
        raise call.refusal("it was exported in training mode; export the model after model.eval()")
    value = call.inputs[0]
    eps, dims = call.attribute("epsilon", 1e-5), call.rank()
    if dims not in _NORMS or not all(is_constant(one) for one in call.inputs[1:5]):
        scale, bias, mean, var = call.inputs[1:5]
        return call.emit(F.batch_norm, value, mean, var, scale, bias, False, 0.0, eps)
    scale, bias, mean, var = (call.constant(place, "statistics") for place in range(1, 5))
    layer = _NORMS[dims](len(scale), eps, 1 - call.attribute("momentum", 0.9), device="meta")
    layer.num_batches_tracked = torch.tensor(0)
    tensors = {"weight": scale, "bias": bias, "running_mean": mean, "running_var": var}
    return call.layer(layer, eps, dict(tensors), value)


@operator("LayerNormalization", first=17)
@operator("LayerNormalization", domain="com.microsoft")
@operator("LayerNormalization", domain="sparsebit")
def _layer_norm(call: Call) -> Value:
    value, scale, bias = call.inputs[0], call.inputs[1], call.input(2)
    eps, axis = call.attribute("epsilon", 1e-5), call.axis(call.attribute("axis", -1))
    shape = tuple(example_of(value).shape[axis:])
    given = [one for one in (scale, bias) if one is not None]
    if not all(is_constant(one) and tuple(one.shape) == shape for one in given):
        plain = call.emit(F.layer_norm, value, shape, None, None, eps)
        scaled = plain if scale is None else call.emit(torch.mul, plain, scale)
        return scaled if bias is None else call.emit(torch.add, scaled, bias)
    if scale is None:
        return call.emit(F.layer_norm, value, shape, None, None, eps)
    layer = nn.LayerNorm(shape, eps, bias=bias is not None, device="meta")
    return call.layer(layer, (shape, eps), {"weight": scale, "bias": bias}, value)


@operator("SkipLayerNormalization", domain="com.microsoft")
def _skip_layer_norm(call: Call) -> list[Value]:
    value, skip, gamma = call.inputs[:3]
    total = call.emit(torch.add, value, skip)
    if call.input(4) is not None:
        total = call.emit(torch.add, total, call.inputs[4])
    shape = tuple(example_of(value).shape[-1:])
    eps = call.attribute("epsilon", 1e-5)
    layer = nn.LayerNorm(shape, eps, bias=call.input(3) is not None, device="meta")
    return [call.layer(layer, (shape, eps), {"weight": gamma, "bias": call.input(3)}, total), None, None, total]


@operator("RMSNormalization", first=23)
@operator("SimplifiedLayerNormalization")
def _rms_norm(call: Call) -> Value:
    value, scale = call.inputs[0], call.inputs[1]
    eps, axis = call.attribute("epsilon", 1e-5), call.axis(call.attribute("axis", -1))
    shape = tuple(example_of(value).shape[axis:])
    if not is_constant(scale) or tuple(scale.shape) != shape:
        return call.emit(torch.mul, call.emit(F.rms_norm, value, shape, None, eps), scale)
    return call.layer(nn.RMSNorm(shape, eps, device="meta"), (shape, eps), {"weight": scale}, value)


@operator("GroupNormalization", first=18)
def _group_norm(call: Call) -> Value:
    value, scale, bias = call.inputs[0], call.constant(1, "scale"), call.constant(2, "bias")
    groups, eps = call.attribute("num_groups"), call.attribute("epsilon", 1e-5)
    channels = example_of(value).shape[1]
    if call.opset < 21 and scale.numel() == groups != channels:  # of one group each; later of one channel each
        scale, bias = (call.graph.named(one.repeat_interleave(channels // groups), one) for one in (scale, bias))
    layer = nn.GroupNorm(groups, channels, eps, device="meta")
    return call.layer(layer, (groups, eps), {"weight": scale, "bias": bias}, value)


@operator("InstanceNormalization")
def _instance_norm(call: Call) -> Value:
    value, scale, bias = call.inputs
    return call.emit(F.instance_norm, value, weight=scale, bias=bias, eps=call.attribute("epsilon", 1e-5))


@operator("LpNormalization")
def _lp_norm(call: Call) -> Value:
    return call.emit(F.normalize, call.inputs[0], float(call.attribute("p", 2)), call.attribute("axis", -1))


@operator("MeanVarianceNormalization")
def _mean_variance_norm(call: Call) -> Value:
    value, axes = call.inputs[0], tuple(call.attribute("axes", [0, 2, 3]))
    centred = call.emit(torch.sub, value, call.method("mean", value, axes, keepdim=True))
    variance = call.method("mean", call.emit(torch.mul, centred, centred), axes, keepdim=True)
    return call.emit(torch.div, centred, call.emit(torch.add, call.emit(torch.sqrt, variance), 1e-9))


@operator("LRN")
def _lrn(call: Call) -> Value:
    alpha, beta, bias = (
        call.attribute(name, default) for name, default in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))
    )
    size = call.attribute("size")
    if size % 2 == 0:
        raise call.refusal(f"an even size of {size}, which ONNX and torch centre differently")
    return call.emit(F.local_response_norm, call.inputs[0], size, alpha, beta, bias)


@operator("Dropout")
def _dropout(call: Call) -> list[Value]:
    """Off, as it is in every file for inference."""
    return [call.inputs[0], None]


@operator("MaxPool")
def _max_pool(call: Call) -> list[Value]:
    kernel = list(call.attribute("kernel_shape"))
    if len(kernel) not in _MAX_POOLS or (len(call.node.output) > 1 and call.node.output[1]):
        raise call.refusal("a pool over 1 to 3 axes without its indices is allowed")
    strides, dilations, pads = _window(call, kernel)
    value, padding = _padded(call, call.inputs[0], pads, -math.inf)
    if any(2 * pad > k for pad, k in zip(padding, kernel, strict=True)):  # more than torch allows
        pairs = [pad for axis in reversed(range(len(kernel))) for pad in (pads[axis], pads[axis + len(kernel)])]
        value, padding = call.emit(F.pad, call.inputs[0], pairs, value=-math.inf), (0,) * len(kernel)
    ceil = bool(call.attribute("ceil_mode", 0))
    return [call.emit(_MAX_POOLS[len(kernel)], value, tuple(kernel), strides, padding, dilations, ceil), None]


@operator("AveragePool")
def _average_pool(call: Call) -> Value:
    kernel = list(call.attribute("kernel_shape"))
    strides, dilations, pads = _window(call, kernel)
    if len(kernel) not in _AVERAGE_POOLS or any(one != 1 for one in dilations):
        raise call.refusal("an average pool over 1 to 3 axes without dilation is allowed")
    pool, counts_pads = _AVERAGE_POOLS[len(kernel)], bool(call.attribute("count_include_pad", 0))
    value, padding = _padded(call, call.inputs[0], pads)
    settings = (tuple(kernel), strides, padding, bool(call.attribute("ceil_mode", 0)), counts_pads)
    found = call.emit(pool, value, *settings)
    if value is call.inputs[0] or counts_pads:
        return found
    ones = torch.ones((1, 1, *example_of(call.inputs[0]).shape[2:]), dtype=example_of(value).dtype)
    shares = pool(_padded(call, ones, pads)[0], *settings)
    return call.emit(torch.div, found, shares)


@operator("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(call: Call) -> Value:
    dims = call.rank() - 2
    if dims not in (1, 2, 3):
        raise call.refusal(f"a pool over {dims} axes; torch has those over 1 to 3")
    return call.emit(_ADAPTIVE[call.node.op_type][dims], call.inputs[0], 1 if dims == 1 else (1,) * dims)
