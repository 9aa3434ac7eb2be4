"""The values that flow while a file is loaded: constants, tensors of the graph in progress, and numbers that are known.

- `torch.Tensor`: a constant. Operators on constants alone are computed while the file is loaded.
- `fx.Proxy`: a tensor of the graph in progress; `example_of` is its value for the example inputs.
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
    """`items` in order, of which at least one is an fx.Proxy; `shape` as that of a tensor, () for one number."""

    items: tuple[Number, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int64


Value: TypeAlias = Any  # Tensor | fx.Proxy | Numbers | None


def numbers(
    items: Iterable[Number], shape: tuple[int, ...] | None = None, dtype: torch.dtype = torch.int64
) -> Tensor | Numbers:
    """Numbers (a vector, if no shape is given), or a constant if all of them are known."""
    found = tuple(items)
    shape = (len(found),) if shape is None else tuple(shape)
    if any(isinstance(item, fx.Proxy) for item in found):
        return Numbers(found, shape, dtype)
    return torch.tensor(found, dtype=dtype).reshape(shape)


def example_of(value: Any) -> Any:
    """The value for the example inputs."""
    if isinstance(value, fx.Proxy):
        return value.__dict__["example"]
    if isinstance(value, Numbers):
        items = [example_of(item) for item in value.items]
        return torch.tensor(items, dtype=value.dtype).reshape(value.shape)
    if isinstance(value, slice):
        return slice(*map(example_of, (value.start, value.stop, value.step)))
    return value


def examples(tree: Any) -> Any:
    """The arguments of a call with every proxy replaced by its example."""
    return pytree.tree_map(example_of, tree, is_leaf=lambda leaf: isinstance(leaf, (fx.Proxy, slice)))


def has_proxy(*trees: Any) -> bool:
    """Whether anything in the arguments is computed at run time."""
    leaves = pytree.tree_leaves(trees)
    ends = [end for leaf in leaves if isinstance(leaf, slice) for end in (leaf.start, leaf.stop, leaf.step)]
    return any(isinstance(leaf, fx.Proxy) for leaf in (*leaves, *ends))


def is_constant(value: Value) -> bool:
    return isinstance(value, Tensor)


def rank(value: Value) -> int:
    """The number of dimensions."""
    return len(value.shape) if isinstance(value, Numbers) else int(example_of(value).ndim)


def items_of(value: Tensor | Numbers) -> list[Number]:
    """The elements in order. 0.7 in float32 is 0.7, not 0.699999988: 10 * 0.7 is 7 for a runtime, and its floor too."""
    if isinstance(value, Numbers):
        return list(value.items)
    if value.dtype == torch.float32:
        return [float(str(item)) for item in value.reshape(-1).numpy()]
    return value.reshape(-1).tolist()


def elementwise(function: Callable[..., Number], *values: Tensor | Numbers) -> Tensor | Numbers:
    """The function of each element of constants and Numbers, with broadcasting; of the first one's type."""
    places = [torch.arange(len(items_of(value))).reshape(value.shape) for value in values]
    chosen = torch.broadcast_tensors(*places)
    lists = [items_of(value) for value in values]
    columns = [[items[i] for i in index.reshape(-1).tolist()] for items, index in zip(lists, chosen, strict=True)]
    return numbers((function(*row) for row in zip(*columns, strict=True)), chosen[0].shape, values[0].dtype)
