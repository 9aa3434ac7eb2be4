"""Normalizations: layers where scale and shift are constant."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sparsebit.deploy.loading.building.call import Call
from sparsebit.deploy.loading.building.operator_table import operator
from sparsebit.deploy.loading.building.values import Value, example_of, is_constant

_NORMS: dict[int, Any] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@operator("BatchNormalization")
def _batch_norm(call: Call) -> Value:
    if call.attribute("training_mode", 0) or any(call.node.output[1:]):
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
    mode = call.input(2)
    if mode is not None and not (is_constant(mode) and not mode.any()):
        raise call.refusal("it was exported in training mode; export the model after model.eval()")
    return [call.inputs[0], None]
