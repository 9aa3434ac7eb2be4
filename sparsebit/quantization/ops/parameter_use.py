"""Finds which parameters are operands of matrix products and convolutions, and along which axis they are summed.

One forward is observed with a `TorchDispatchMode`, below autograd: linear, matmul, einsum and grouped products are all
one of a few ATen operators there. An operand belongs to a parameter if it has the same memory, or is a copy of a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sparsebit.graph.checking.outcome import cloned, state_kept, undisturbed_randomness
from sparsebit.graph.state.outer_state import undisturbed_outer_state

# By operator: the axis of each operand along which products are summed up; None for one that is only added.
_PRODUCTS: dict[str, tuple[int | None, ...]] = {
    # `grouped_mm_fallback` is an operator of transformers, which it uses if torch has no grouped product.
    **dict.fromkeys(("mm", "bmm", "_grouped_mm", "grouped_mm_fallback"), (-1, -2)),
    **dict.fromkeys(("mv", "linear", "mkldnn_linear"), (-1, -1)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm"), (None, -1, -2)),
    "addmv": (None, -1, -1),
}
# Copies of a parameter, or of a part of it, with its axes in the same order in memory.
_COPIES = frozenset({"index", "index_select", "_to_copy", "clone", "contiguous", "_unsafe_view", "copy"})


class UseOfParameters(TorchDispatchMode):
    """Inside, records for each of `parameters` the axis along which a product sums it up (`summed`), or the axis of the
    output channels if it is the kernel of a convolution (`channels`).

    A product of a view of the parameter, or of a copy of a part of it, counts for the parameter.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parameters = parameters
        self.summed: dict[str, int] = {}
        self.channels: dict[str, int] = {}
        self._of_storage = {_storage(parameter): name for name, parameter in parameters.items()}
        self._held: list[Tensor] = []  # copies are kept alive, so that no other tensor can get their memory's address

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in _PRODUCTS:
            for operand, axis in zip(args, _PRODUCTS[name], strict=False):
                if axis is not None and isinstance(operand, Tensor):
                    self._note(operand, axis)
        elif name == "convolution":
            kernel = self._of_storage.get(_storage(args[1]))
            if kernel is not None and args[1].shape == self.parameters[kernel].shape:
                self.channels[kernel] = 1 if args[6] else 0  # args[6]: transposed, whose kernel is (in, out, ...)
        elif name in _COPIES:
            self._follow(args[0], result)
        return result

    def _note(self, operand: Tensor, axis: int) -> None:
        name = self._of_storage.get(_storage(operand))
        if name is not None:
            found = axis_of(self.parameters[name], operand, axis)
            if found is not None:
                self.summed.setdefault(name, found)

    def _follow(self, source: Any, result: Any) -> None:
        if not isinstance(source, Tensor) or not isinstance(result, Tensor) or not result.numel():
            return
        name = self._of_storage.get(_storage(source))
        if name is not None and _storage(result) not in self._of_storage:
            self._of_storage[_storage(result)] = name
            self._held.append(result)


def axis_of(parameter: Tensor, operand: Tensor, axis: int) -> int | None:
    """The axis of the parameter that corresponds to the operand's axis; None if size and stride do not determine it.

    A view keeps both size and stride; a copy of a part keeps the size.
    """
    if operand.ndim < -axis:
        return None
    size, stride = operand.shape[axis], operand.stride(axis)
    axes = range(1 if parameter.ndim > 2 else 0, parameter.ndim)  # the first axis of a stack counts matrices
    by_size = [index for index in axes if parameter.shape[index] == size]
    by_stride = [index for index in axes if parameter.stride(index) == stride]
    both = [index for index in by_size if index in by_stride]
    for found in (both, by_size, by_stride):
        if len(found) == 1:
            return found[0]
    return None


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else -1


def observe_use(parameters: Mapping[str, Tensor], model: nn.Module, args: Any, kwargs: Any) -> UseOfParameters:
    """Observe one forward in eval mode; the call's tensors, all state and random numbers are restored."""
    args, kwargs = cloned((args, kwargs))
    use = UseOfParameters(parameters)
    with state_kept(model), undisturbed_outer_state(model), undisturbed_randomness(), torch.no_grad(), use:
        model.eval()(*args, **kwargs)
    return use
