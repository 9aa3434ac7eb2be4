"""What an example input tells a trace: every traced value also has an example value, without data and without compute.

With it, questions that a trace cannot answer by itself (`if x.dim() == 4`, `for k in features`, `(*x.shape[:-1], -1)`) are
answered from the example. Each answer that another input could change becomes a guard in the graph: a call for which it
does not hold is noticed, and runs the module's own code instead.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import proxy as fx_proxy
from torch.utils import _pytree as pytree


class GuardError(Exception):
    """A call that the captured graph does not stand for. Never seen by users: the module's own code takes over."""


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()


def guard(value: Any, expected: Any, line: str) -> None:
    """A node of captured graphs: what the trace took for granted at `line`."""
    if (len(value) if isinstance(value, torch.Tensor) and value.dim() and not isinstance(expected, bool) else type(expected)(value)) != expected:
        raise GuardError(f"{line}: {expected!r} was captured")


class Example:
    """Evaluates nodes on fake tensors. One per capture; `values` of nodes live in `node.meta`."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(self, value: Any) -> Any:
        """The same nest with fake tensors in it."""
        return pytree.tree_map_only(torch.Tensor, self._fake_tensor, value)

    def _fake_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def evaluate(self, compute: Callable[[], Any]) -> Any:
        """`compute()` without data; UNKNOWN where it needs data, or anything else that fakes do not have."""
        try:
            with self.mode, torch.no_grad():
                return compute()
        except Exception:  # the trace goes on without an answer
            return UNKNOWN


def value_of(node: fx.Node) -> Any:
    return node.meta.get("example", UNKNOWN)


class _Answers:
    """Python's questions to a traced value, answered from the example where there is one."""

    node: fx.Node
    tracer: Any

    def __bool__(self) -> bool:
        value = value_of(self.node)
        if value is UNKNOWN or isinstance(value, torch.Tensor):
            return bool(self.tracer.to_bool(self))
        return bool(self._specialise(bool(value)))

    def __len__(self) -> int:
        value = value_of(self.node)
        if value is UNKNOWN or not hasattr(value, "__len__"):
            raise fx_proxy.TraceError("len() of a traced value")
        return int(self._specialise(len(value)) if isinstance(value, torch.Tensor) else len(value))

    def __iter__(self) -> Iterator[Any]:
        value = value_of(self.node)
        if isinstance(value, Mapping):
            return iter(value)
        if isinstance(value, (Sequence, torch.Tensor)) and not isinstance(value, str):
            return iter([self[index] for index in range(len(self))])  # type: ignore[index]
        wanted = _unpacked_into(inspect.currentframe())
        if wanted is None:
            raise fx_proxy.TraceError("iterates over a traced value")
        return iter([self[index] for index in range(wanted)])  # type: ignore[index]

    def __contains__(self, key: Any) -> bool:
        value = value_of(self.node)
        if isinstance(value, Mapping):
            return key in value
        raise fx_proxy.TraceError("`in` a traced value")

    def __int__(self) -> int:
        return int(self._number(int))

    def __index__(self) -> int:
        return int(self._number(int))

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

    def _mapping_method(self, name: str) -> Callable[[], Any] | None:
        value = value_of(self.node)
        if not isinstance(value, Mapping) or name not in ("items", "values", "keys"):
            return None
        pairs = [(key, self[key]) for key in value]  # type: ignore[index]
        return {"items": lambda: pairs, "keys": lambda: list(value), "values": lambda: [item for _, item in pairs]}[name]


class ExampleProxy(_Answers, fx.Proxy):
    """A traced value with an example."""

    def __getattr__(self, name: str) -> Any:
        return self._mapping_method(name) or ExampleAttribute(self, name)


class ExampleAttribute(_Answers, fx_proxy.Attribute):
    """`x.shape`, `x.dtype`…: becomes a node when used as a value, a method call when called."""

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        if self._node is None:
            self._node = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {}).node
        return self._node

    def __getattr__(self, name: str) -> Any:
        return self._mapping_method(name) or ExampleAttribute(self, name)


def _unpacked_into(frame: types.FrameType | None) -> int | None:
    """Into how many names the caller unpacks (`b, n, c = x.shape`); None where it does something else."""
    caller = frame.f_back if frame is not None else None
    if caller is None:
        return None
    current = next((i for i in dis.get_instructions(caller.f_code) if i.offset == caller.f_lasti), None)
    return int(current.argval) if current is not None and current.opname == "UNPACK_SEQUENCE" else None


@contextlib.contextmanager
def plain_training(root: nn.Module) -> Iterator[None]:
    """Inside, every module's `training` is a plain False, whatever stands there during a trace."""
    saved = [(module, module.__dict__["training"]) for module in root.modules()]
    try:
        for module, _ in saved:
            module.__dict__["training"] = False
        yield
    finally:
        for module, training in saved:
            module.__dict__["training"] = training
