"""Products of matrices: linear layers where one of them is constant."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsebit.deploy.loading.building.call import Call
from sparsebit.deploy.loading.building.operator_table import operator
from sparsebit.deploy.loading.building.values import Value, is_constant, rank


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


@operator("Einsum")
def _einsum(call: Call) -> Value:
    return call.emit(torch.einsum, call.attribute("equation").replace(" ", ""), *call.inputs)
