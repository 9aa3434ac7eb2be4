"""Activation functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sparsebit.deploy.loading.building.call import Call
from sparsebit.deploy.loading.building.operator_table import operator
from sparsebit.deploy.loading.building.values import Value, example_of, is_constant

_PLAIN: dict[str, Callable[..., Any]] = {
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "HardSwish": F.hardswish, "Mish": F.mish,
    "Softplus": F.softplus, "Softsign": F.softsign,
}  # fmt: skip


@operator(*_PLAIN)
@operator("HardSwish", domain="sparsebit")
def _plain(call: Call) -> Value:
    return call.emit(_PLAIN[call.node.op_type], call.inputs[0])


@operator("LeakyRelu")
def _leaky_relu(call: Call) -> Value:
    return call.emit(F.leaky_relu, call.inputs[0], call.attribute("alpha", 0.01))


@operator("Elu", "Celu")
def _elu(call: Call) -> Value:
    return call.emit(F.elu if call.node.op_type == "Elu" else F.celu, call.inputs[0], call.attribute("alpha", 1.0))


@operator("Selu")
def _selu(call: Call) -> Value:
    value = call.inputs[0]
    alpha, gamma = call.attribute("alpha"), call.attribute("gamma")
    if alpha is None and gamma is None:
        return call.emit(F.selu, value)
    alpha, gamma = (
        1.67326319217681884765625 if alpha is None else alpha,
        1.05070102214813232421875 if gamma is None else gamma,
    )
    return call.emit(torch.mul, call.emit(F.elu, value, alpha), gamma)


@operator("PRelu")
def _prelu(call: Call) -> Value:
    value, slope = call.inputs
    if is_constant(slope) and not is_constant(value):
        channels = example_of(value).shape[1] if call.rank() > 1 else 1
        is_per_channel = slope.numel() == channels and slope.shape[:1].numel() == channels == slope.shape[0]
        if slope.numel() == 1 or (is_per_channel and slope.ndim == call.rank() - 1):
            count = slope.numel()
            weight = call.graph.named(slope.reshape(count).clone(), slope)
            return call.layer(nn.PReLU(count, device="meta"), count, {"weight": weight}, value)
    negative = call.emit(torch.mul, call.emit(torch.clamp, value, max=0), slope)
    return call.emit(torch.add, call.emit(torch.relu, value), negative)


@operator("HardSigmoid")
def _hard_sigmoid(call: Call) -> Value:
    alpha, beta = call.attribute("alpha", 0.2), call.attribute("beta", 0.5)
    if abs(alpha - 1 / 6) < 1e-6 and beta == 0.5:
        return call.emit(F.hardsigmoid, call.inputs[0])
    scaled = call.emit(torch.add, call.emit(torch.mul, call.inputs[0], alpha), beta)
    return call.emit(F.hardtanh, scaled, 0.0, 1.0)


@operator("Gelu", first=20)
@operator("Gelu", domain="sparsebit")
def _gelu(call: Call) -> Value:
    return call.emit(F.gelu, call.inputs[0], approximate=call.attribute("approximate", "none"))


@operator("Gelu", "FastGelu", "BiasGelu", domain="com.microsoft")
def _contrib_gelu(call: Call) -> Value:
    value, bias = call.inputs[0], call.input(1)
    value = value if bias is None else call.emit(torch.add, value, bias)
    return call.emit(F.gelu, value, approximate="tanh" if call.node.op_type == "FastGelu" else "none")


@operator("QuickGelu", domain="com.microsoft")
def _quick_gelu(call: Call) -> Value:
    value = call.inputs[0]
    return call.emit(
        torch.mul, value, call.emit(torch.sigmoid, call.emit(torch.mul, value, call.attribute("alpha", 1.702)))
    )


@operator("Swish", first=24)
@operator("Swish", domain="sparsebit")
def _swish(call: Call) -> Value:
    value, alpha = call.inputs[0], call.attribute("alpha", 1.0)
    if alpha == 1.0:
        return call.emit(F.silu, value)
    return call.emit(torch.mul, value, call.emit(torch.sigmoid, call.emit(torch.mul, value, alpha)))


@operator("ThresholdedRelu")
def _thresholded_relu(call: Call) -> Value:
    return call.emit(F.threshold, call.inputs[0], call.attribute("alpha", 1.0), 0.0)


@operator("Shrink")
def _shrink(call: Call) -> Value:
    value, limit, bias = call.inputs[0], call.attribute("lambd", 0.5), call.attribute("bias", 0.0)
    low = call.emit(torch.where, call.emit(torch.lt, value, -limit), call.emit(torch.add, value, bias), 0.0)
    return call.emit(torch.where, call.emit(torch.gt, value, limit), call.emit(torch.sub, value, bias), low)


@operator("Softmax", "LogSoftmax", first=13)
def _softmax(call: Call) -> Value:
    function = F.softmax if call.node.op_type == "Softmax" else F.log_softmax
    return call.emit(function, call.inputs[0], dim=call.axis(call.attribute("axis", -1)))


@operator("Softmax", "LogSoftmax", last=12)
def _flat_softmax(call: Call) -> Value:
    """Before opset 13 all axes from `axis` on are one."""
    value, axis = call.inputs[0], call.axis(call.attribute("axis", 1))
    function = F.softmax if call.node.op_type == "Softmax" else F.log_softmax
    if all(call.fixed_size(place) == 1 for place in range(axis + 1, call.rank())):
        return call.emit(function, value, dim=axis)
    flat = call.emit(torch.flatten, value, axis)
    sizes = [call.size(place) for place in range(axis, call.rank())]
    return call.emit(torch.unflatten, call.emit(function, flat, dim=axis), axis, tuple(sizes))


@operator("Hardmax", first=13)
def _hardmax(call: Call) -> Value:
    value, axis = call.inputs[0], call.axis(call.attribute("axis", -1))
    best = call.emit(torch.argmax, value, axis, keepdim=True)
    zeros = call.emit(torch.zeros_like, value)
    return call.method("scatter", zeros, axis, best, 1.0)
