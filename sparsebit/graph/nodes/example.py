"""Example values during a trace: every traced value also has an example value, without data and without compute.

With it, questions that a trace cannot answer by itself (`if x.dim() == 4`, `for k in features`, `(*x.shape[:-1], -1)`)
are answered from the example. Each answer that another input could change becomes a guard in the graph: if the guard
fails for a call, that call runs the module's own code instead.
"""

from __future__ import annotations

import dis
import logging
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import proxy as fx_proxy

from sparsebit.graph.nodes.aliasing import OPERATORS
from sparsebit.graph.values.failures import FAILURES, is_ours
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


# Attributes of a tensor that code compares with None.
_NONE_WITHOUT_GRADIENTS = ("grad", "grad_fn", "_grad", "_base")
_FIELDS = frozenset({"tracer", "node", "root", "attr"})  # of torch.fx's proxies, set once


class _Answers:
    """Answers `len(x)`, `bool(x)`, iteration and the like for a traced value, from its example if there is one."""

    node: fx.Node
    tracer: Any

    def __setattr__(self, name: str, value: Any) -> None:
        """`weight.data = ...`, `x.requires_grad = True`: a graph has no place for what user code sets on a tensor."""
        if name not in ("_node", "__dict__") and (name not in _FIELDS or name in self.__dict__):
            self.tracer.refuse(f"sets the attribute {name!r} of a tensor")
        super().__setattr__(name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """For code that reads `x.__class__`; `isinstance`, in C and in torch, gets the real class."""
        if reads_class(sys._getframe(1)) and self.tracer.is_tracing_here():
            kind: type = self.tracer.class_of(self)
            return kind
        return type(self)

    def __bool__(self) -> bool:
        value = value_of(self.node)
        if value is UNKNOWN or isinstance(value, torch.Tensor):
            return bool(self.tracer.to_bool(self))
        return bool(self._specialise(bool(value)))

    def __len__(self) -> int:
        value = value_of(self.node)
        if value is UNKNOWN or not hasattr(value, "__len__"):
            raise fx_proxy.TraceError("len() of a traced value")
        return int(self._specialise(len(value)))

    @property
    def __iter__(self) -> Callable[[], Iterator[Any]]:
        """A property, so that the function of torch.fx, which unpacks an unknown value into names, sees its caller."""
        value = value_of(self.node)
        if isinstance(value, Mapping):
            return lambda: iter(self._keys(value))
        if isinstance(value, (Sequence, torch.Tensor)) and not isinstance(value, str):
            return lambda: iter([self[index] for index in range(len(self))])  # type: ignore[index]
        return super().__iter__  # type: ignore[misc,no-any-return]

    def __contains__(self, key: Any) -> bool:
        value = value_of(self.node)
        if isinstance(value, Mapping):
            return key in self._keys(value)
        raise fx_proxy.TraceError("`in` a traced value")

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __int__(self) -> int:
        return int(self._number(int))

    __index__ = __int__

    def __float__(self) -> float:
        return float(self._number(float))

    def _number(self, kind: type) -> Any:
        value = value_of(self.node)
        if not isinstance(value, (int, float)):
            raise fx_proxy.TraceError(f"{kind.__name__}() of a traced value")
        return self._specialise(kind(value))

    def _specialise(self, answer: Any) -> Any:
        self.tracer.add_guard(self.node, answer)
        return answer

    def _keys(self, value: Mapping[Any, Any]) -> tuple[Any, ...]:
        return tuple(self._specialise(tuple(value)))

    def _attribute(self, name: str) -> Any:
        """`x.name`: a lazy attribute, or its value where the example already determines it."""
        if name in ("items", "keys", "values", "get"):
            method = self._mapping_method(name)
            if method is not None:
                return method
        elif name in _NONE_WITHOUT_GRADIENTS and value_of(self.node) is UNKNOWN:
            self.tracer.refuse(f"reads .{name} of a tensor: `is None` cannot be traced")
        elif not name.startswith("__") and getattr(value_of(self.node), name, UNKNOWN) is None:
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return ExampleAttribute(self, name)  # type: ignore[arg-type]

    def _mapping_method(self, name: str) -> Callable[..., Any] | None:
        value = value_of(self.node)
        if value is UNKNOWN and name == "get":
            raise fx_proxy.TraceError("asks a traced mapping what it holds")
        if not isinstance(value, Mapping):
            return None
        keys = self._keys(value)
        if name == "get":
            return lambda key, default=None: self[key] if key in keys else default  # type: ignore[index]
        pairs = [(key, self[key]) for key in keys]  # type: ignore[index]
        found = {"items": pairs, "keys": list(keys), "values": [item for _, item in pairs]}[name]
        return lambda: found


def _inplace_method(inplace: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: self.tracer.write(inplace, self, other)


# torch.fx treats `x += y` as `x = x + y`; code that holds the same tensor by another name would not see the write.
for _inplace in OPERATORS:
    setattr(_Answers, f"__{_inplace.__name__}__", _inplace_method(_inplace))


class ExampleProxy(_Answers, fx.Proxy):
    """A traced value with an example."""

    def __getattr__(self, name: str) -> Any:
        return self._attribute(name)


class ExampleAttribute(_Answers, fx_proxy.Attribute):
    """`x.shape`, `x.dtype`…: becomes a node when used as a value, a method call when called."""

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        # An erased node was made inside a module whose trace was given up.
        if self._node is None or self._node._erased:
            self._node = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {}).node
        return self._node

    def __getattr__(self, name: str) -> Any:
        return self._attribute(name)


def reads_class(frame: types.FrameType) -> bool:
    """Whether the frame's current instruction is `.__class__`, in code that is neither torch's nor ours."""
    code = frame.f_code
    if "__class__" not in code.co_names or (is_ours(code.co_filename) and not code.co_filename.startswith("<")):
        return False
    running = (i for i in dis.get_instructions(code) if i.offset == frame.f_lasti)
    return any((i.opname, i.argval) == ("LOAD_ATTR", "__class__") for i in running)
