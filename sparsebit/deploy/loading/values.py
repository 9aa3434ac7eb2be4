"""The values that flow while a file is loaded: constants, tensors of the graph in progress, and numbers that are known.

- `torch.Tensor`: a constant. Operators on constants alone are computed while the file is loaded.
- `fx.Proxy`: a tensor of the graph in progress; `example_of` gives its value for the example inputs.
- `Numbers`: a vector or scalar of which each element is a Python number of the graph in progress, such as a size.
  Sizes that ONNX computes with tensor operators become Python arithmetic, so that a dynamic batch stays dynamic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

Number: TypeAlias = Any  # int, float, bool, or an fx.Proxy of one


@dataclass(frozen=True)
class Numbers:
    """At least one of `items` is an fx.Proxy; `is_scalar`: of rank 0, with one item."""

    items: tuple[Number, ...]
    is_scalar: bool = False
    dtype: torch.dtype = torch.int64


Value: TypeAlias = Any  # Tensor | fx.Proxy | Numbers | None


def numbers(items: Iterable[Number], is_scalar: bool = False, dtype: torch.dtype = torch.int64) -> Tensor | Numbers:
    """Numbers, or a constant if all of them are known."""
    found = tuple(items)
    if any(isinstance(item, fx.Proxy) for item in found):
        return Numbers(found, is_scalar, dtype)
    return torch.tensor(found[0] if is_scalar else list(found), dtype=dtype)


def example_of(value: Any) -> Any:
    """The value for the example inputs."""
    if isinstance(value, fx.Proxy):
        return value.__dict__["example"]
    if isinstance(value, Numbers):
        items = [example_of(item) for item in value.items]
        return torch.tensor(items[0] if value.is_scalar else items, dtype=value.dtype)
    return value


def examples(tree: Any) -> Any:
    """The arguments of a call with every proxy replaced by its example."""
    return pytree.tree_map(example_of, tree, is_leaf=lambda leaf: isinstance(leaf, (fx.Proxy, slice)))


def has_proxy(*trees: Any) -> bool:
    """Whether anything in the arguments is computed at run time."""
    return any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves(trees))


def is_constant(value: Value) -> bool:
    return isinstance(value, Tensor)


def rank(value: Value) -> int:
    """The number of dimensions."""
    if isinstance(value, Numbers):
        return 0 if value.is_scalar else 1
    return int(example_of(value).ndim)


def elementwise(function: Callable[..., Number], *values: Tensor | Numbers) -> Tensor | Numbers:
    """The function of each element of constants and Numbers of rank 0 or 1, with broadcasting."""
    lists = [_items(value) for value in values]
    length = max(map(len, lists))
    rows = zip(*(items * length if len(items) == 1 else items for items in lists), strict=True)
    dtype = next(value.dtype for value in values if isinstance(value, (Numbers, Tensor)))
    return numbers((function(*row) for row in rows), all(rank(value) == 0 for value in values), dtype)


def _items(value: Tensor | Numbers) -> list[Number]:
    return list(value.items) if isinstance(value, Numbers) else value.reshape(-1).tolist()
