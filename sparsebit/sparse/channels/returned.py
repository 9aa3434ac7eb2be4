"""All tensors that a model returns, in whatever objects: channels that are returned must stay."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from sparsebit.graph.values.nested import tensors_of

_MOST_ITEMS = 10_000  # of an iterator: it may have no end
_WITHOUT_VALUES = (str, bytes, int, float, complex, type, ModuleType, CodeType, BuiltinFunctionType, nn.Module)


def results_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call returns, and those of its arguments, which it may have written into."""
    return [*returned_tensors(model(*args, **kwargs)), *tensors_of((args, kwargs))]


def returned_tensors(result: Any) -> list[Tensor]:
    """The tensors in containers, records, other objects, closures, and in the items of iterators and generators.

    Iterators are read, so call it where the model runs.
    """
    found: list[Tensor] = []
    seen: dict[int, Any] = {}  # holds the objects too: the id of a freed object could be used again
    waiting = [result]
    while waiting:
        value = waiting.pop()
        if value is None or id(value) in seen or isinstance(value, _WITHOUT_VALUES):
            continue
        seen[id(value)] = value
        parts: list[Any]
        if isinstance(value, Tensor):
            found.append(value)
            continue
        if isinstance(value, Iterator):
            parts = list(itertools.islice(value, _MOST_ITEMS))
        elif type(value) in (list, tuple):
            parts = list(value)
        elif isinstance(value, FunctionType):
            parts = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # not filled
                    parts.append(cell.cell_contents)
        else:
            parts = gc.get_referents(value)
        waiting += reversed(parts)
    return found
