"""Arithmetic, comparisons and logic, element by element."""

from __future__ import annotations

import math
import operator as python
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from sparsebit.deploy.loading.building.call import Call, torch_type
from sparsebit.deploy.loading.building.operator_table import operator
from sparsebit.deploy.loading.building.values import (
    Number,
    Numbers,
    Value,
    elementwise,
    example_of,
    is_constant,
    numbers,
    rank,
)

_UNARY: dict[str, Callable[..., Any]] = {
    "Neg": torch.neg, "Abs": torch.abs, "Sqrt": torch.sqrt, "Exp": torch.exp, "Log": torch.log,
    "Reciprocal": torch.reciprocal, "Sign": torch.sign, "Floor": torch.floor, "Ceil": torch.ceil, "Round": torch.round,
    "Erf": torch.erf, "Sin": torch.sin, "Cos": torch.cos, "Tan": torch.tan, "Asin": torch.asin, "Acos": torch.acos,
    "Atan": torch.atan, "Sinh": torch.sinh, "Cosh": torch.cosh, "Asinh": torch.asinh, "Acosh": torch.acosh,
    "Atanh": torch.atanh, "Not": torch.logical_not, "IsNaN": torch.isnan, "BitwiseNot": torch.bitwise_not,
    "Det": torch.det,
}  # fmt: skip

_BINARY: dict[str, Callable[..., Any]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Equal": torch.eq,
    "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le,
    "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor,
    "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
}  # fmt: skip

# Of Python numbers; torch's operators above are those of tensors.
_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "Add": python.add, "Sub": python.sub, "Mul": python.mul, "Neg": python.neg, "Sqrt": math.sqrt,
    "Floor": math.floor, "Ceil": math.ceil,
}  # fmt: skip

_MOST_NUMBERS = 64  # of a vector of sizes; tables of constants are tensors
_COMMUTATIVE = frozenset({"Add", "Mul"})


@operator(*_UNARY)
def _unary(call: Call) -> Value:
    value = call.inputs[0]
    if isinstance(value, Numbers) and call.node.op_type in _OF_NUMBERS:
        return _of_numbers(call, _OF_NUMBERS[call.node.op_type], value)
    return call.emit(_UNARY[call.node.op_type], value)


@operator(*_BINARY)
def _binary(call: Call) -> Value:
    name = call.node.op_type
    left, right = call.inputs
    if _are_numbers(left, right):
        if name in _OF_NUMBERS:
            return _of_numbers(call, _OF_NUMBERS[name], left, right)
        if name == "Equal" and (known := _equal(left, right)) is not None:
            return known
    if name in _COMMUTATIVE and is_constant(left):
        left, right = right, left
    left = _scalar(left, right) if name in _OF_NUMBERS else left  # a comparison takes a tensor on its left
    return call.emit(_BINARY[name], left, _scalar(right, left))


def _equal(left: Tensor | Numbers, right: Tensor | Numbers) -> Tensor | None:
    """Whether sizes equal constants, if it is known: exporters ask whether a size is -1, and none is."""
    answers: list[Number] = []

    def compare(one: Number, other: Number) -> bool:
        known = [item for item in (one, other) if not isinstance(item, fx.Proxy)]
        if len(known) == 2:
            return bool(one == other)
        answers.append(bool(known) and known[0] < 0)
        return False

    found = elementwise(compare, left, right)
    return found.to(torch.bool) if all(answers) and isinstance(found, Tensor) else None


@operator("Div")
def _div(call: Call) -> Value:
    left, right = call.inputs
    is_float = all(example_of(value).dtype.is_floating_point for value in (left, right))
    if _are_numbers(left, right):
        if is_float:
            return _of_numbers(call, python.truediv, left, right)
        return elementwise(lambda one, other: _quotient(call, one, other), left, right)
    if is_float:
        return call.emit(torch.div, _scalar(left, right), _scalar(right, left))
    return call.emit(torch.div, left, right, rounding_mode="trunc")


def _quotient(call: Call, left: Number, right: Number) -> Number:
    """The integer quotient, rounded to zero as ONNX does; Python rounds down."""
    if _is_never_negative(left) and _is_never_negative(right):
        return call.number(python.floordiv, left, right)
    size = call.number(python.floordiv, call.number(abs, left), call.number(abs, right))
    is_negative = call.number(python.lt, call.number(python.mul, left, right), 0)
    return call.number(python.mul, size, call.number(python.sub, 1, call.number(python.mul, 2, is_negative)))


def _is_never_negative(item: Number) -> bool:
    """Whether it is a size, or a sum, product or quotient of sizes and numbers from 0 on."""
    if not isinstance(item, fx.Proxy):
        return bool(item >= 0)
    return _is_size(item.node)


def _is_size(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target == "size"
    return node.target in (python.add, python.mul, python.floordiv) and all(
        _is_size(arg) if isinstance(arg, fx.Node) else isinstance(arg, int) and arg >= 0 for arg in node.args
    )


@operator("Mod")
def _mod(call: Call) -> Value:
    left, right = call.inputs
    if call.attribute("fmod", 0):
        return call.emit(torch.fmod, left, right)
    return (
        _of_numbers(call, python.mod, left, right)
        if _are_numbers(left, right)
        else call.emit(torch.remainder, *call.inputs)
    )


@operator("Pow")
def _pow(call: Call) -> Value:
    base, exponent = call.inputs
    if is_constant(exponent) and exponent.numel() == 1 and exponent.ndim <= rank(base):
        value = exponent.item()
        return call.emit(torch.pow, base, int(value) if float(value).is_integer() else value)
    result = call.emit(torch.pow, base, exponent)
    return call.method("to", result, example_of(base).dtype)


@operator("BitShift")
def _bit_shift(call: Call) -> Value:
    is_left = call.attribute("direction") == "LEFT"
    return call.emit(torch.bitwise_left_shift if is_left else torch.bitwise_right_shift, *call.inputs)


@operator("IsInf")
def _is_inf(call: Call) -> Value:
    signs = call.attribute("detect_negative", 1), call.attribute("detect_positive", 1)
    function = {(1, 1): torch.isinf, (0, 1): torch.isposinf, (1, 0): torch.isneginf}.get(signs)
    if function is None:
        raise call.refusal("it detects neither sign")
    return call.emit(function, call.inputs[0])


@operator("Sum", "Mean", "Max", "Min")
def _of_several(call: Call) -> Value:
    """Any number of tensors, element by element."""
    kind = call.node.op_type
    if kind in ("Max", "Min") and len(call.inputs) == 2 and _are_numbers(*call.inputs):
        return _of_numbers(call, torch.sym_max if kind == "Max" else torch.sym_min, *call.inputs)
    function = {"Max": torch.maximum, "Min": torch.minimum}.get(kind, torch.add)
    found = call.inputs[0]
    for value in call.inputs[1:]:
        found = call.emit(function, found, value)
    return call.emit(torch.div, found, len(call.inputs)) if kind == "Mean" else found


@operator("Where")
def _where(call: Call) -> Value:
    condition, left, right = call.inputs
    if is_constant(condition) and _are_numbers(left, right):
        return elementwise(lambda one, other, chosen: one if chosen else other, left, right, condition)
    return call.emit(torch.where, condition, left, right)


@operator("Cast", "CastLike")
def _cast(call: Call) -> Value:
    value = call.inputs[0]
    like = call.input(1)
    dtype = torch_type(call.attribute("to", 0), call) if like is None else example_of(like).dtype
    if isinstance(value, Numbers):
        kind: Any = float if dtype.is_floating_point else int
        is_same = value.dtype.is_floating_point == dtype.is_floating_point
        items = (
            value.items
            if is_same
            else [call.emit(kind, i) if isinstance(i, fx.Proxy) else kind(i) for i in value.items]
        )
        return numbers(items, value.shape, dtype)
    return value if example_of(value).dtype == dtype else call.method("to", value, dtype)


@operator("Clip")
def _clip(call: Call) -> Value:
    value, least, most = call.inputs[0], call.input(1), call.input(2)
    limits = [_scalar(limit, value) for limit in (least, most)]
    plain = [limit for limit in limits if not isinstance(limit, (Tensor, fx.Proxy, Numbers))]
    if len(plain) < len(limits):  # a limit that is computed
        for limit, function in zip(limits, (torch.maximum, torch.minimum), strict=True):
            if limit is not None:
                wanted = torch.tensor(limit, dtype=example_of(value).dtype) if limit in plain else limit
                value = call.emit(function, value, wanted)
        return value
    if limits == [None, None]:
        return value
    if limits == [0.0, 6.0]:
        return call.emit(torch.nn.functional.relu6, value)
    if limits == [0.0, None]:
        return call.emit(torch.relu, value)
    if None not in limits and example_of(value).is_floating_point():
        return call.emit(torch.nn.functional.hardtanh, value, *limits)
    return call.emit(torch.clamp, value, *limits)


def _are_numbers(*values: Value) -> bool:
    """Whether Python can compute it: Numbers among small vectors, and no tensor of the graph."""
    return any(isinstance(value, Numbers) for value in values) and all(
        isinstance(value, Numbers) or (is_constant(value) and value.numel() <= _MOST_NUMBERS) for value in values
    )


def _of_numbers(call: Call, function: Callable[..., Number], *values: Tensor | Numbers) -> Tensor | Numbers:
    """The function of each element, as nodes of Python arithmetic."""
    return elementwise(lambda *items: call.number(function, *items), *values)


def _scalar(value: Value, other: Value) -> Value:
    """A constant of one number as a Python number, if that has the same result with `other`."""
    if not is_constant(value) or is_constant(other) or isinstance(other, Numbers) or value.numel() != 1:
        return value
    if value.ndim > rank(other) or value.dtype != example_of(other).dtype or value.dtype == torch.bool:
        return value
    return value.item()
