"""`with_own_tensors`: turns results that are views, made while gradients are off, into tensors of their own.

A quantized copy is contiguous even if its original is not. On such a copy an op (`F.linear`, `reshape`) may return a
view of a temporary where it would return a new tensor to the model. Autograd refuses to write into a view that was
made under `torch.no_grad()` once gradients are recorded again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.graph.values.nested import is_symbolic, map_nested, storage_of, tensors_of


def with_own_tensors(output: Any, inputs: Any) -> Any:
    """`output`, with views detached from their base if no input or other output shares the memory.

    Only while gradients are off: otherwise autograd tracks views.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return output
    tensors = [output] if isinstance(output, Tensor) else tensors_of(output)
    if not any(map(_is_view, tensors)) or is_symbolic(tensors):
        return output
    others = [storage_of(x) for x in (*tensors_of(inputs), *tensors)]
    return map_nested(Tensor, lambda x: x.data if _is_view(x) and others.count(storage_of(x)) == 1 else x, output)


def _is_view(x: Tensor) -> bool:
    return x._is_view() and x.layout is torch.strided and not x.is_inference()
