"""Traced values, and their answers to the questions that Python asks of them while a model's code runs.

Each answer comes from the example value (`example.py`), and becomes a guard where another call could have another one.

| question | answer | without an example |
|---|---|---|
| `bool(x)`, `if x` | of a number, a string, a container; a tensor: refused | refused |
| `len(x)`, `x in mapping`, `int(x)`, `float(x)`, `x[:n]` | the example's | the trace of the module ends |
| `for y in x` | one proxy for each item or key | only as many names as `a, b = x` has |
| `x.name` | None where it is; else another traced value | a traced value |
| `mapping.items()`, `keys`, `values`, `get` | the example's keys, a proxy for each value | a node for the call |
| `type(x)`, `isinstance`, `x.__class__`, `callable` | `class_of` | a tensor |
| `hasattr(x, name)`, `getattr(x, name, default)` | `has_attribute` | as for a tensor |
| `x += y`, `x[i] = y` | a node that writes | the same |
| `x.name = y` | refused | refused |

`isinstance`, `type`, `hasattr`, `getattr` and `callable` call no method of `x`, so `traced_builtins.py` replaces them.
"""

from __future__ import annotations

import dis
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx import proxy as fx_proxy

from sparsebit.graph.nodes.aliasing import OPERATORS
from sparsebit.graph.nodes.example import UNKNOWN, class_name, kind_of, value_of
from sparsebit.graph.nodes.value_kinds import is_part_of_input, python_values
from sparsebit.graph.state.training_flag import TrainingFlag
from sparsebit.graph.values.failures import is_ours

_OF_TUPLES = (nn.RNNBase, nn.MultiheadAttention)
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
        if _reads_class(sys._getframe(1)) and self.tracer.is_tracing_here():
            return class_of(self.tracer, self)
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


def class_of(tracer: Any, value: Any) -> type:
    """The class of the value that is traced; guarded where it depends on an input."""
    if isinstance(value, TrainingFlag):
        return bool
    example = value_of(value.node)
    if example is UNKNOWN and value.node in python_values(tracer.graph):
        tracer.refuse("asks for the class of a size that is not known without example_inputs")
    kind = torch.Tensor if example is UNKNOWN else _class_of_example(example)
    if _may_vary(tracer, value.node):
        tracer.add_guard(tracer.create_proxy("call_function", kind_of, (value,), {}).node, class_name(kind))
    return kind


def has_attribute(tracer: Any, value: Any, name: str) -> bool:
    if isinstance(value, TrainingFlag):
        return hasattr(False, name)
    example = value_of(value.node)
    answer = hasattr(torch.Tensor if example is UNKNOWN else example, name)
    if _may_vary(tracer, value.node):
        tracer.add_guard(tracer.create_proxy("call_function", hasattr, (value, name), {}).node, answer)
    return answer


def _may_vary(tracer: Any, node: fx.Node) -> bool:
    """Whether another call could bring a value of another class.

    Without an example a value is assumed to be a tensor, and guarded; a result of unknown code is not.
    """
    module = tracer.root.get_submodule(str(node.target)) if node.op == "call_module" else None
    if module is not None:
        is_known = type(module).__module__.startswith("torch.nn.") and not isinstance(module, _OF_TUPLES)
        if value_of(node) is UNKNOWN and not is_known:
            tracer.refuse("asks for the class of a value that is not known without example_inputs")
        return not is_known
    return value_of(node) is UNKNOWN or node.op == "placeholder" or is_part_of_input(node)


def _class_of_example(example: Any) -> type:
    if isinstance(example, torch.Tensor):
        original = getattr(example, "_class_of_original", type(example))
        return original if class_name(original) != "Tensor" else torch.Tensor
    return type(example)


def _reads_class(frame: types.FrameType) -> bool:
    """Whether the frame's current instruction is `.__class__`, in code that is neither torch's nor ours."""
    code = frame.f_code
    if "__class__" not in code.co_names or (is_ours(code.co_filename) and not code.co_filename.startswith("<")):
        return False
    running = (i for i in dis.get_instructions(code) if i.offset == frame.f_lasti)
    return any((i.opname, i.argval) == ("LOAD_ATTR", "__class__") for i in running)
