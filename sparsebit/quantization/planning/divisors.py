"""Values that must not be rounded to zero: divisors, and inputs of logarithms and reciprocals.

A grid contains zero, and all values below half a step become zero: `x / x.abs().amax(-1)` of a quiet row becomes
NaN. So such a value stays in float, and so do the ops that compute only it.
"""

from __future__ import annotations

from numbers import Number
from typing import Any

from torch import fx

from sparsebit.graph.ops.op_rows import OpKind, OpRow

NOT_ZERO = "its result is a divisor, or its logarithm is taken: rounded to zero it would make infinity"
# Ops, by name, whose second or first operand must not be zero.
_BY_SECOND = frozenset(
    {"div", "divide", "true_divide", "truediv", "itruediv", "floordiv", "ifloordiv", "floor_divide", "remainder"}
    | {"fmod", "mod", "imod", "__truediv__", "__floordiv__", "__mod__"}
)
_BY_FIRST = frozenset({"log", "log2", "log10", "rsqrt", "reciprocal", "logit", "digamma", "lgamma", "__rtruediv__"})
_POWERS = frozenset({"pow", "ipow", "__pow__", "float_power"})
# Ops that mix many values or saturate, so that their result does not become zero where one input is rounded to zero.
_ENDS = frozenset(
    {"matmul", "bmm", "baddbmm", "einsum", "attention", "batch_norm", "layer_norm", "group_norm", "instance_norm"}
    | {"rms_norm", "softmax", "log_softmax", "sigmoid", "softplus"}
)


def reads_as_divisor(node: fx.Node) -> set[fx.Node]:
    """The inputs of the op that must not be zero."""
    name = str(getattr(node.target, "__name__", node.target)).removesuffix("_")
    if node.op not in ("call_function", "call_method"):
        return set()
    first = node.args[0] if node.args else node.kwargs.get("input")
    second = node.args[1] if len(node.args) > 1 else node.kwargs.get("other", node.kwargs.get("exponent"))
    found: list[Any] = []
    if name in _BY_SECOND:
        found = [second]
    elif name in _BY_FIRST or (name in _POWERS and isinstance(second, Number) and second < 0):
        found = [first]
    elif name == "addcdiv":
        found = [node.args[2] if len(node.args) > 2 else node.kwargs.get("tensor2")]
    return {source for source in found if isinstance(source, fx.Node)}


def divisor_only_ops(graph: fx.Graph, rows: dict[fx.Node, OpRow]) -> set[fx.Node]:
    """Ops whose result is only used in divisors: these stay in float, back to the op where many values are mixed."""
    makers: set[fx.Node] = set()
    for node in (node for node in reversed(graph.nodes) if node.op.startswith("call_") and node.users):
        is_end = node in rows and (rows[node].kind is OpKind.WEIGHTED or rows[node].name in _ENDS)
        if not is_end and all(user in makers or node in reads_as_divisor(user) for user in node.users):
            makers.add(node)
    return makers
