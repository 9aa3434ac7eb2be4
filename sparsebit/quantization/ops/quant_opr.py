"""`QuantOpr`: an op with its quantizers in front. `QIdentity`: a quantizer that stands alone in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from sparsebit.quantization.ops.table import OpRow, tensor_arguments, weight_argument
from sparsebit.quantization.quantizers.base import Quantizer


class QuantOpr(nn.Module):
    """`op` (a module, a function or a method's name) run on its quantized input and, where it has one, its quantized weight.

    Attributes that it lacks itself (`weight`, `bias`, `stride`…) are its op's. Subclass to register an op of your own
    (`register_qmodule`).
    """

    def __init__(self, op: nn.Module | Callable[..., Any] | str, row: OpRow, input_quantizer: Quantizer, weight_quantizer: Quantizer | None = None) -> None:
        super().__init__()
        self.op = op
        self.row = row
        self.input_quantizer = input_quantizer
        self.weight_quantizer = weight_quantizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments = list(args)
        for where, value in tensor_arguments(self.row, args, kwargs)[:1]:
            quantized = self.input_quantizer(value)
            if isinstance(where, int):
                arguments[where] = quantized
            else:
                kwargs[where] = quantized
        return self.compute(*arguments, **kwargs)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """The op itself on quantized values."""
        if isinstance(self.op, str):
            return getattr(args[0], self.op)(*args[1:], **kwargs)
        return self.op(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            op = self.__dict__.get("_modules", {}).get("op")
            if op is None or name.startswith("__"):
                raise
            return getattr(op, name)

    def _get_name(self) -> str:
        if isinstance(self.op, nn.Module):
            return f"Q{type(self.op).__name__}"
        return f"Q[{self.op if isinstance(self.op, str) else getattr(self.op, '__name__', self.op)}]"

    def __repr__(self) -> str:
        """One line: the op, and its quantizers (with their numbers once they are on)."""
        inner = self.op.extra_repr() if isinstance(self.op, nn.Module) else ""
        parts = [inner] if inner else []
        parts.append(f"input={self.input_quantizer.summary()}")
        if self.weight_quantizer is not None:
            parts.append(f"weight={self.weight_quantizer.summary()}")
        return f"{self._get_name()}({', '.join(parts)})"


class WeightedQuantOpr(QuantOpr):
    """A layer that owns its weight: conv, transposed conv, linear, embedding, and childless subclasses of them."""

    op: nn.Module
    weight_quantizer: Quantizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.row.inputs and args:
            args = (self.input_quantizer(args[0]), *args[1:])
        elif self.row.inputs and kwargs:
            first = next(iter(kwargs))
            kwargs = {**kwargs, first: self.input_quantizer(kwargs[first])}
        if not self.weight_quantizer.is_enable:
            return self.op(*args, **kwargs)
        return self._with_weight(self.weight_quantizer(self.op.weight), args, kwargs)

    def _with_weight(self, weight: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(self.op, nn.Linear) and _is_plain(self.op) and len(args) == 1:
            return nn.functional.linear(args[0], weight, self.op.bias)
        if isinstance(self.op, _ConvNd) and not isinstance(self.op, _ConvTransposeNd) and _is_plain(self.op) and len(args) == 1:
            return self.op._conv_forward(args[0], weight, self.op.bias)  # honours padding_mode
        return torch.func.functional_call(self.op, {"weight": weight}, args, kwargs)


class FunctionalWeightedQuantOpr(QuantOpr):
    """`F.conv2d(x, weight, …)`, `F.linear(x, weight, …)`: the weight is an argument, possibly computed on the way."""

    weight_quantizer: Quantizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        sites = [(place, self.input_quantizer) for place in tensor_arguments(self.row, args, kwargs)[:1]]
        weight = weight_argument(self.row, args, kwargs)
        if weight is not None:
            sites.append((weight, self.weight_quantizer))
        arguments = list(args)
        for (where, value), quantizer in sites:
            if isinstance(where, int):
                arguments[where] = quantizer(value)
            else:
                kwargs[where] = quantizer(value)
        return self.compute(*arguments, **kwargs)


class MultipleInputsQuantOpr(QuantOpr):
    """An op with several tensor inputs: it quantizes nothing itself; each of its inputs has a `QIdentity` in front.

    The graph keeps such ops as they are; this class is the base for those that users register.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(*args, **kwargs)


class QIdentity(nn.Module):
    """A quantizer alone: in front of one input of a multi-input op, behind an op's output, or where several ops read one tensor."""

    def __init__(self, input_quantizer: Quantizer) -> None:
        super().__init__()
        self.input_quantizer = input_quantizer

    def forward(self, x: Any) -> Any:
        return self.input_quantizer(x)

    def __repr__(self) -> str:
        return f"QIdentity({self.input_quantizer.summary()})"


def _is_plain(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")
