"""Nests of values: tuples, dictionaries, dataclasses, a tokenizer's or a model's output class."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree


def map_nested(kind: type | tuple[type, ...], function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` applied to everything of `kind` in it; containers and dataclasses are made anew.

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
    """Every tensor in a nest."""
    found: list[torch.Tensor] = []
    map_nested(torch.Tensor, found.append, value)
    return found
