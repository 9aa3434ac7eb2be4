"""Nested structures of values: tuples, dictionaries, dataclasses, output classes of tokenizers and models."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode


def map_nested(kind: type | tuple[type, ...], function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` applied to everything of `kind` in it; containers and dataclasses are new objects.

    >>> map_nested(int, str, {"a": (1, [2.5, 3])})
    {'a': ('1', [2.5, '3'])}
    """

    def on_leaf(leaf: Any) -> Any:
        if isinstance(leaf, kind):
            return function(leaf)
        if isinstance(leaf, Mapping):  # more than a dict: a tokenizer's output, a model's output class
            pairs = [(key, map_nested(kind, function, item)) for key, item in leaf.items()]
            mapping: Any = copy.copy(leaf)
            for key, item in pairs:
                mapping[key] = item
            return mapping
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            record = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                # `object`: frozen ones too
                object.__setattr__(record, field.name, map_nested(kind, function, getattr(leaf, field.name)))
            return record
        return leaf

    return pytree.tree_map(on_leaf, value, is_leaf=lambda part: isinstance(part, torch.Size))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in a nested structure."""
    found: list[torch.Tensor] = []
    map_nested(torch.Tensor, found.append, value)
    return found


def is_symbolic(tensors: list[torch.Tensor]) -> bool:
    """Whether the tensors have no values now: under a compiler, in an export, inside `torch.func`."""
    if torch.compiler.is_compiling():  # first, since a compiler cannot trace the tests below
        return True
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    is_traced = torch._C._get_tracing_state() is not None
    is_watched = _get_current_dispatch_mode() is not None
    return is_transformed or is_traced or is_watched or any(x.is_meta or isinstance(x, FakeTensor) for x in tensors)


def storage_of(x: torch.Tensor) -> int:
    """A number that tensors share if they share memory."""
    return x.untyped_storage()._cdata if x.layout is torch.strided and not x.is_nested else id(x)


def unwrapped(x: torch.Tensor) -> list[torch.Tensor]:
    """The tensors inside of one that `torch.func` has wrapped: under `vmap`, one for each element of the batch."""
    functorch = torch._C._functorch
    if functorch.is_batchedtensor(x):
        parts = functorch.get_unwrapped(x).unbind(functorch.maybe_get_bdim(x))
    elif functorch.is_functorch_wrapped_tensor(x):
        parts = (functorch.get_unwrapped(x),)
    else:
        return [x]
    return [tensor for part in parts for tensor in unwrapped(part)]
