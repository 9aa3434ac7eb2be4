"""Example values during a trace: every traced value also has an example value, without data and without compute.

With it, questions that a trace cannot answer by itself (`if x.dim() == 4`, `for k in features`, `(*x.shape[:-1], -1)`)
are answered from the example (`tracing/proxies.py`). Each answer that another input could change becomes a guard in the
graph: if the guard fails for a call, that call runs the module's own code instead.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sized
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sparsebit.graph.values.failures import FAILURES
from sparsebit.graph.values.nested import map_nested


class GuardError(Exception):
    """Raised by a graph for a call that it does not cover. Users do not see it: the module's own code runs instead.

    `advice`: what the user can do to have a graph for such calls.
    """

    def __init__(self, reason: str, advice: str = "build the QuantModel with example_inputs like this call's") -> None:
        super().__init__(reason)
        self.advice = advice


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


_quiet = threading.local()
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda _: not getattr(_quiet, "is_on", False))
UNKNOWN = _Unknown()
GIVEN = "given"


def guard(value: Any, expected: Any, line: str) -> None:
    """A node of captured graphs that checks what the trace assumed at `line`.

    `expected`: None; GIVEN (not None); a number; a length where the value has one; a mapping's keys as a tuple.
    """
    try:
        if expected in (None, GIVEN):
            holds = (value is None) == (expected is None)
        else:
            holds = bool(_answer(value, expected) == expected)
    except (TypeError, ValueError, RuntimeError):  # a value of another kind than the captured one
        holds = False
    if not holds:
        raise GuardError(f"{line}: {expected!r} was captured, and this call differs")


def kind_of(value: Any) -> str:
    """A node of captured graphs: the name of the value's class. Subclasses that torch defines count as tensors."""
    is_fake = isinstance(value, torch.Tensor) and hasattr(value, "_class_of_original")
    return class_name(value._class_of_original if is_fake else type(value))


def class_name(kind: Any) -> str:
    if issubclass(kind, torch.Tensor) and kind.__module__.partition(".")[0] == "torch":
        return "Parameter" if issubclass(kind, nn.Parameter) else "Tensor"
    return f"{kind.__module__}.{kind.__qualname__}"


def _answer(value: Any, expected: Any) -> Any:
    if isinstance(value, Sized) and type(expected) is int:
        return len(value)
    return type(expected)(value)


class Example:
    """Evaluates nodes on fake tensors. One per capture; `values` of nodes live in `node.meta`."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.evaluate(lambda: torch.ones(1) + 1)  # torch imports modules at first use, which must happen unpatched

    def fake(self, value: Any) -> Any:
        """The same nested structure with fake tensors in it."""
        return map_nested(torch.Tensor, self._fake_tensor, value)

    def _fake_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided or tensor.is_nested:
            return UNKNOWN  # sparse and nested tensors have no strides, and few ops know them without data
        with self.mode:
            fake: Any = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        if class_name(type(tensor)) != "Tensor":
            fake._class_of_original = type(tensor)
        return fake

    def evaluate(self, compute: Callable[[], Any]) -> Any:
        """`compute()` without data; UNKNOWN where it needs data, or anything else that fakes do not have."""
        _quiet.is_on = True  # an op that fake tensors do not support is not an error here
        try:
            with self.mode, torch.no_grad():
                return evaluate_plainly(compute)
        finally:
            _quiet.is_on = False


def evaluate_plainly(compute: Callable[[], Any]) -> Any:
    """`compute()`; UNKNOWN where that fails: the trace continues without a value."""
    try:
        return compute()
    except FAILURES:
        return UNKNOWN


def value_of(node: fx.Node) -> Any:
    return node.meta.get("example", UNKNOWN)


def forget_values(graph: fx.Graph) -> None:
    """Keep only shape and type of every example tensor, since the graph is kept longer than the example."""
    for node in graph.nodes:
        if "example" in node.meta:
            node.meta["example"] = map_nested(
                torch.Tensor,
                lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"),
                node.meta["example"],
            )
