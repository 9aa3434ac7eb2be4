"""`read_quantized`: from then on `self.weight` of a module returns the quantized values, wherever code reads it.

For parameters that no op of the graph owns: the stacked weights of a mixture of experts, the gates of an LSTM. Their
module keeps its own code, and gets a subclass of its class (as in `torch.nn.utils.parametrize`) in which reading the
attribute goes through a quantizer. The parameter itself stays registered under its own name: optimizers, `state_dict`
and `load_state_dict` see the float master weight.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.quantization.quantizers.base import Quantizer

# The child module that holds the quantizers of a module's parameters.
CHILD = "quantized_parameters"


class QuantizedParameter(nn.Module):
    """The quantizer of one parameter. In a graph it is a node after the read of that parameter."""

    def __init__(self, owner: nn.Module, name: str, layer: str, weight_quantizer: Quantizer) -> None:
        """`layer`: the owner's path in the model."""
        super().__init__()
        self._owner = (owner,)  # in a tuple, so that it is not registered as a child
        self.parameter_name, self.layer = name, layer
        self.weight_quantizer = weight_quantizer
        self.train(owner.training)

    @property
    def owner(self) -> nn.Module:
        return self._owner[0]

    @property
    def parameter(self) -> Tensor:
        """The float master weight."""
        parameter = self.owner._parameters[self.parameter_name]
        assert parameter is not None
        return parameter

    def forward(self, x: Tensor) -> Any:
        return self.weight_quantizer(x)

    def __repr__(self) -> str:
        return f"QuantizedParameter({self.parameter_name}: {self.weight_quantizer.summary()})"


def read_quantized(owner: nn.Module, parameters: dict[str, QuantizedParameter]) -> None:
    """From now on any code reads `owner`'s parameters of these names through their quantizers."""
    owner._modules[CHILD] = nn.ModuleDict(parameters)
    owner.__dict__["_reads"] = _Reads()
    owner.__dict__.pop("_flat_weights", None)  # a recurrent layer's list of weights: made anew at every read
    kind: Any = type(owner)  # Any, because mypy does not treat classes of modules as hashable
    owner.__class__ = _reading_class(kind, tuple(parameters))


class _Reads(threading.local):
    """The values that one thread has read in its current forward; None outside of a forward."""

    values: dict[str, Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Reads:
        return _Reads()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Reads, ()


@functools.lru_cache(maxsize=512)
def _reading_class(kind: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """`kind` with `names` read through quantizers, and with each quantized once per forward."""

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return kind.forward(self, *args, **kwargs)
        with _remembering(self):
            return kind.forward(self, *args, **kwargs)

    attributes: dict[str, Any] = {name: property(_getter(name), _setter(name)) for name in names}
    if issubclass(kind, nn.RNNBase):  # its forward reads a list that is created when weights are assigned
        attributes["_flat_weights"] = property(_flat_weights, _forget_list)
    attributes |= {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), attributes)


@contextmanager
def _remembering(module: Any) -> Iterator[None]:
    """Inside, repeated reads of a parameter quantize it once: a mixture reads its stack anew for each expert."""
    reads: _Reads = module.__dict__["_reads"]
    if reads.values is not None:
        yield
        return
    reads.values = {}
    try:
        yield
    finally:
        reads.values = None


def _getter(name: str) -> Any:
    def get(self: Any) -> Any:
        parameter = self._parameters[name] if name in self._parameters else self.__dict__.get(name)
        quantized: QuantizedParameter | None = self._modules[CHILD]._modules.get(name)
        if parameter is None or quantized is None:
            return parameter
        if torch.compiler.is_compiling():
            return quantized(parameter)
        values = self.__dict__["_reads"].values
        if values is None:
            return quantized(parameter)
        # A value that was computed under no_grad has no autograd history, and cannot be reused where one is needed.
        key = f"{name}@{torch.is_grad_enabled()}"
        if key not in values:
            values[key] = quantized(parameter)
        return values[key]

    return get


def _setter(name: str) -> Any:
    def put(self: Any, value: Any) -> None:
        """For values that are not parameters: `nn.DataParallel` assigns plain tensors to its copies."""
        self.__dict__[name] = value

    return put


def _forget_list(self: Any, value: Any) -> None:
    """Ignore torch's assignments to the list, which follow a move or a copy of the weights: it is made at each read."""


def _flat_weights(self: Any) -> list[Any]:
    return [getattr(self, name, None) for name in self._flat_weights_names]
