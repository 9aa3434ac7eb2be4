"""`RuntimeModel`: a candidate's file in its runtime, called as the float model is, with outputs of the same form."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.deploy.comparing.file_model import FileModel


class RuntimeModel(FileModel):
    """The file as a module for the user's own evaluation.

    `outputs`: of the float model, whose form (a tensor, a tuple, a mapping such as transformers') the file's outputs
    get. It has one empty parameter, because evaluations ask a model's first parameter for its device.
    """

    def __init__(self, file: Path, runtime: str, model: nn.Module, outputs: Any) -> None:
        super().__init__(file, runtime, inspect.signature(model.forward))
        self.outputs = outputs
        self.device_marker = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        return formed(self.outputs, iter([found] if isinstance(found, Tensor) else found))


def formed(like: Any, tensors: Iterator[Tensor]) -> Any:
    """The tensors in the form of `like`, whose own tensors they replace in order.

    >>> formed({"a": torch.zeros(1), "b": None}, iter([torch.ones(1)]))
    {'a': tensor([1.]), 'b': None}
    """
    if isinstance(like, Mapping) and hasattr(like, "to_tuple"):  # transformers' outputs are built by keywords
        return type(like)(**{key: formed(value, tensors) for key, value in like.items()})
    leaves, spec = pytree.tree_flatten(like)
    return pytree.tree_unflatten([next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
