"""`QuantOpr`: an op with quantizers before it. `QIdentity`: a separate quantizer in the graph.

These are the modules that a quantized graph calls: `WeightedQuantOpr` for layers that own their weight,
`FunctionalWeightedQuantOpr` for `F.linear(x, w, b)`, `GatedQuantOpr` for silu and hardswish, `QIdentity` and `QShared`
for tensors with several readers. `building/attach_quantizers.py` makes them; a user's own op subclasses `QuantOpr`.

A wrapper passes for its layer: attributes, `isinstance`, hooks and parameter names are those of the layer, so that
the model's own code and optimizers work unchanged. With all quantizers off, the values are those of the float op.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.first_sparsebit import former_method
from sparsebit.graph.nodes.stand_in import StandIn
from sparsebit.graph.ops.op_rows import OpKind, OpRow
from sparsebit.graph.ops.op_table import bias_argument, input_argument, weight_argument
from sparsebit.graph.values.own_tensors import with_own_tensors
from sparsebit.quantization.ops.bias import BiasRounding
from sparsebit.quantization.ops.integer_ops import IntegerHardSigmoid, IntegerLayer, IntegerMultiply, with_gradient_of
from sparsebit.quantization.ops.layer_call import call_with_hooks, forward_with, is_hooked
from sparsebit.quantization.ops.repeated_calls import CallArithmetics, note_grid
from sparsebit.quantization.quantizers.base import Quantizer

Op = nn.Module | Callable[..., Any] | str


class QuantOpr(StandIn):
    """`op` (a module, a function or a method's name) on its quantized input and, if it has one, its quantized weight.

    Attributes that it lacks itself (`weight`, `bias`, `stride`…) are read from its op, and `isinstance(layer,
    nn.Linear)` is true if it is for the op. Subclass it to register your own op (`register_qmodule`).
    """

    KIND: ClassVar[OpKind] = OpKind.UNARY
    op: Op
    row: OpRow
    input_quantizer: Quantizer
    weight_quantizer: Quantizer | None

    def __init__(
        self,
        op: Op | None = None,
        row: OpRow | None = None,
        input_quantizer: Quantizer | None = None,
        weight_quantizer: Quantizer | None = None,
    ) -> None:
        """Constructors `__init__(self, org_module, config)` call it without arguments: `new` sets the rest."""
        super().__init__()
        # Set by `attach_integer_ops` if the runtime executes the layer in integers.
        self.bias_rounding: BiasRounding | None = None
        self.integer: IntegerLayer | None = None
        self.per_call: CallArithmetics | None = None  # instead of these two, if calls have inputs on different grids
        if op is not None and row is not None and input_quantizer is not None:
            self._fill(op, row, input_quantizer, weight_quantizer)

    def _fill(self, op: Op, row: OpRow, input_quantizer: Quantizer, weight_quantizer: Quantizer | None) -> None:
        self.op, self.row = op, row
        self.input_quantizer, self.weight_quantizer = input_quantizer, weight_quantizer

    @classmethod
    def new(cls, op: Op, row: OpRow, input_quantizer: Quantizer, weight_quantizer: Quantizer | None = None) -> Self:
        """The op with its quantizers. A user's class may have the constructor `__init__(self, org_module, config)`."""
        if "org_module" not in inspect.signature(cls).parameters:
            return cls(op, row, input_quantizer, weight_quantizer)
        made = cls(op, None)
        made._fill(op, row, input_quantizer, weight_quantizer)
        return made

    @property
    def arithmetics(self) -> list[tuple[BiasRounding | None, IntegerLayer | None]]:
        """The int32 bias and the integer kernel, for each input's grid."""
        calls: Any = [self] if self.per_call is None else self.per_call
        return [(call.bias_rounding, call.integer) for call in calls]

    def set_quant(self, w_quant: bool = False, a_quant: bool = False) -> None:
        """Switch this op's weight and input quantizers on or off."""
        # The input's quantizer first: it may raise, and then nothing has changed.
        for quantizer, wanted in ((self.input_quantizer, a_quant), (self.weight_quantizer, w_quant)):
            if quantizer is not None:
                quantizer.enable_quant() if wanted else quantizer.disable_quant()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(*self.quantize_input(args, kwargs), **kwargs)

    def _replaced_module(self) -> nn.Module | None:
        op: nn.Module | None = self.__dict__.get("_modules", {}).get("op")
        return op

    def quantize_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The positional arguments with the input quantized; a keyword input is replaced in `kwargs`."""
        if len(args) == 1 and not kwargs and self.row.inputs:
            return (self.input_quantizer(args[0]),)
        place = input_argument(self.row, args, kwargs, is_module="op" in self._modules)
        return args if place is None else _replaced(args, kwargs, place, self.input_quantizer)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """The op itself on quantized values."""
        op: Any = self._modules.get("op")  # `self.op` of a module would be a slow call of `__getattr__`
        if op is None:  # a function, or a method's name
            op = self.op
        if isinstance(op, str):
            return getattr(args[0], op)(*args[1:], **kwargs)
        return op(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes that only the layer has (`conv.stride`, `linear.weight`) on the layer, where they are read."""
        op = self.__dict__.get("_modules", {}).get("op")
        is_own = op is None or name in self.__dict__ or name in self._modules or hasattr(type(self), name)
        if not is_own and hasattr(op, name):
            setattr(op, name, value)
        else:
            super().__setattr__(name, value)

    build_quantizer = former_method("build_quantizer")
    prepare_input_quantizer = former_method("prepare_input_quantizer")

    def _get_name(self) -> str:
        if isinstance(self.op, nn.Module):
            return f"Q{type(self.op).__name__}"
        return f"Q[{self.op if isinstance(self.op, str) else getattr(self.op, '__name__', self.op)}]"

    def __repr__(self) -> str:
        """One line: the op, and its quantizers (with their numbers once they are on)."""
        inner = self.op.extra_repr() if isinstance(self.op, nn.Module) else ""
        quantizers = {"input": self.input_quantizer, "weight": self.weight_quantizer}
        parts = [f"{name}={quantizer.summary()}" for name, quantizer in quantizers.items() if quantizer is not None]
        return f"{self._get_name()}({', '.join([inner, *parts] if inner else parts)})"


class WeightedQuantOpr(QuantOpr):
    """A layer that owns its weight: conv, transposed conv, linear, embedding, and childless subclasses of them."""

    op: nn.Module
    weight_quantizer: Quantizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if is_hooked(self.op):  # hooks see the layer itself, and its input before it is quantized
            return call_with_hooks(self.op, self.compute_layer, args, kwargs)
        return self.compute_layer(*args, **kwargs)

    def compute_layer(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward on its quantized input and weight, without its hooks."""
        # The quantized input is a contiguous copy: an op may return a view of it where the model gets a new tensor.
        return with_own_tensors(self._compute_layer(args, kwargs), args)

    def _compute_layer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arithmetic = self.bias_rounding, self.integer
        bias_rounding, integer = arithmetic if self.per_call is None or not args else self.per_call.choose(args[0])
        args = self.quantize_input(args, kwargs)
        if not self.weight_quantizer.is_enable:
            return self.op.forward(*args, **kwargs)
        weight, bias = self.weight_quantizer(self.op.weight), self.stored_bias()
        if bias is not None and bias_rounding is not None:
            bias = bias_rounding(bias)
        is_plain = len(args) == 1 and not kwargs
        if integer is not None and integer.is_active and is_plain and args[0].dtype == torch.float32:
            compute = partial(_forward_of, self.op)
            return _in_integers(self.row, integer, args[0], weight, bias, compute)
        return forward_with(self.op, weight, bias, args, kwargs)

    def stored_bias(self) -> Tensor | None:
        return getattr(self.op, "bias", None)


class FunctionalWeightedQuantOpr(QuantOpr):
    """`F.conv2d(x, weight, …)`, `F.linear(x, weight, …)`: the weight is an argument, perhaps a computed one."""

    weight_quantizer: Quantizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args = self.quantize_input(args, kwargs)
        place = weight_argument(self.row, args, kwargs)
        if place is not None:
            args = _replaced(args, kwargs, place, self.weight_quantizer)
        if self.integer is None and self.bias_rounding is None:
            return self.compute(*args, **kwargs)
        return self._rounded(args, kwargs)

    def stored_bias(self) -> Tensor | None:
        """The bias that calibration observed; only a bias that does not depend on the inputs is rounded."""
        return None if self.bias_rounding is None else self.bias_rounding.seen

    def _rounded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Round the bias to int32 and use the integer kernel, if weight and bias have the shapes of a layer's."""
        call = (self.row, args, kwargs)
        places = (input_argument(*call, is_module=False), weight_argument(*call), bias_argument(*call))
        x, weight, bias = (_at(args, kwargs, place) for place in places)
        # `F.linear` also takes a vector as weight and a bias that broadcasts, which no layer in a file has.
        if weight.ndim < 2 or (bias is not None and bias.shape != weight.shape[self.row.channel_axis :][:1]):
            return self.compute(*args, **kwargs)
        if bias is not None and self.bias_rounding is not None:
            bias = self.bias_rounding(bias)

        def compute(*tensors: Tensor | None) -> Any:
            positional, named = list(args), dict(kwargs)
            for place, tensor in zip(places, tensors, strict=True):
                if isinstance(place, str):
                    named[place] = tensor
                elif place is not None:
                    positional[place] = tensor
            return self.compute(*positional, **named)

        if self.integer is not None and self.integer.is_active and x.dtype == torch.float32:
            return _in_integers(self.row, self.integer, x, weight, bias, compute)
        return compute(x, weight, bias)


class MultipleInputsQuantOpr(QuantOpr):
    """The base for a user's op with several tensor inputs. It quantizes nothing: a `QIdentity` is before each input.

    Built-in ops with several inputs (add, matmul) are not wrapped at all.
    """

    KIND: ClassVar[OpKind] = OpKind.MULTI

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(*args, **kwargs)


class GatedQuantOpr(QuantOpr):
    """`x * sigmoid(x)`, or with a hard sigmoid, if a runtime executes two integer ops: it quantizes the gate too."""

    def __init__(self, op: Op, row: OpRow, input_quantizer: Quantizer, gate_quantizer: Quantizer) -> None:
        super().__init__(op, row, input_quantizer)
        self.gate_quantizer = gate_quantizer
        # The runtime's own arithmetic, if it is known.
        self.product: IntegerMultiply | None = None
        self.hard_gate: IntegerHardSigmoid | None = None

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        if not self.gate_quantizer.is_enable and not self.gate_quantizer.observing:
            return super().compute(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        gate_of = F.hardsigmoid if self.hard_gate is None else self.hard_gate
        gate = self.gate_quantizer(gate_of(x) if self.row.name == "hardswish" else torch.sigmoid(x))
        return x * gate if self.product is None else self.product(x, gate)


class QIdentity(QuantOpr):
    """A separate quantizer: before an input of a multi-input op, after an output, or where several ops read."""

    def __init__(self, input_quantizer: Quantizer) -> None:
        super().__init__()
        self.op, self.input_quantizer, self.weight_quantizer = "identity", input_quantizer, None
        self.notes_grid = False  # set if a layer chooses its arithmetic by this grid

    def forward(self, x: Any) -> Any:
        x = self.input_quantizer(x)
        if self.notes_grid:
            note_grid(x, self.input_quantizer)
        return x

    def _get_name(self) -> str:
        return "QIdentity"

    def __repr__(self) -> str:
        return f"QIdentity({self.input_quantizer.summary()})"


class QShared(nn.Module):
    """Marks a tensor that is on the grid of `owner` already, after a max pool, a reshape, …: nothing is rounded.

    Runtimes require QuantizeLinear and DequantizeLinear at this place all the same, with the numbers of `owner`. It
    observes nothing, and has no scale or zero point of its own.
    """

    def __init__(self, name: str, owner: Quantizer) -> None:
        super().__init__()
        self.name = name
        self._owner = (owner,)  # in a tuple, so that it is not registered as a child
        self.notes_grid = False

    @property
    def input_quantizer(self) -> Quantizer:
        return self._owner[0]

    def forward(self, x: Any) -> Any:
        if self.notes_grid:
            note_grid(x, self.input_quantizer)
        return x

    def __repr__(self) -> str:
        return f"QShared({self.input_quantizer.name})"


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str, quantizer: Quantizer) -> tuple[Any, ...]:
    if isinstance(place, str):
        kwargs[place] = quantizer(kwargs[place])
        return args
    return (*args[:place], quantizer(args[place]), *args[place + 1 :])


def _at(args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str | None) -> Any:
    return None if place is None else kwargs[place] if isinstance(place, str) else args[place]


def _forward_of(op: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    return forward_with(op, weight, bias, (x,), {})


def _in_integers(
    row: OpRow, integer: IntegerLayer, x: Tensor, weight: Tensor, bias: Tensor | None, compute: Callable[..., Any]
) -> Any:
    """The integer kernel's value, with the gradients of `compute`, the plain op, if they are needed."""

    def sums(codes: Tensor, weight_codes: Tensor) -> Any:
        return compute(codes, weight_codes, None if bias is None else codes.new_zeros(bias.shape))

    channel_axis = x.ndim - weight.ndim + 1 if row.name == "conv" else -1  # one less for an unbatched image
    with torch.no_grad():
        exact = integer(x, weight, bias, channel_axis, sums)
    return with_gradient_of(compute(x, weight, bias), exact) if torch.is_grad_enabled() else exact
