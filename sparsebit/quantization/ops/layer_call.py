"""Runs a layer's forward with another weight and bias, and its hooks around it; the layer itself is not changed.

`torch.func.functional_call` swaps a module's parameters during the call, so other threads compute with the swapped
ones, or even keep them. Here nothing is swapped: layers of torch are called by their functions (`F.linear`), layers
with their own forward through a twin, an object of the same class that shares everything but the two tensors. Only a
forward that was set on the instance, and refers to the layer itself, still needs the swap, and takes a lock.

`ops/quant_opr.py` calls it with the quantized weight at every forward, so the common cases come first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.stateless import _reparametrize_module
from torch.nn.utils.weight_norm import WeightNorm

from sparsebit.graph.state.modes import modes_kept

_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_CONVS = frozenset({nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward})
_TRANSPOSED_CONVS = frozenset({nn.ConvTranspose1d.forward, nn.ConvTranspose2d.forward, nn.ConvTranspose3d.forward})
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
# A forward that was set on an instance may refer to the layer itself, so its parameters have to be swapped: by one
# thread at a time.
_SWAPPING = threading.RLock()
_ABSENT = object()
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def current_weight(layer: nn.Module) -> Tensor:
    """The weight that the next forward computes with, also if torch's own hooks compute it (pruning, weight norm)."""
    with side_effect_free_reads(layer):
        for hook in list(layer._forward_pre_hooks.values()):
            if isinstance(hook, BasePruningMethod | SpectralNorm | WeightNorm):
                hook(layer, ())
        weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


@contextlib.contextmanager
def side_effect_free_reads(layer: nn.Module) -> Iterator[None]:
    """Inside, reading the layer's weight changes nothing: in training a spectral norm changes state at every read."""
    parametrizations: Any = getattr(layer, "parametrizations", None)
    parts = [layer, *(parametrizations.modules() if is_parametrized(layer) else ())]
    with modes_kept(parts):
        for part in parts:
            part.training = False
        yield


def forward_with(layer: nn.Module, weight: Tensor, bias: Tensor | None, args: Args, kwargs: Kwargs) -> Any:
    """`layer.forward(*args, **kwargs)` with these tensors instead of its own; hooks are not called."""
    kind: type[nn.Module] = type(layer).__bases__[0] if is_parametrized(layer) else type(layer)
    if "forward" in layer.__dict__:
        return _patched_forward(_Call(layer, kind, _tensors(weight, bias), args, kwargs))
    forward: Any = kind.forward
    if len(args) == 1 and not kwargs:
        if forward is nn.Linear.forward:
            return F.linear(args[0], weight, bias)
        if forward in _CONVS:
            return layer._conv_forward(args[0], weight, bias)  # type: ignore[operator]
    if forward in _TRANSPOSED_CONVS:
        return _transposed(layer, weight, bias, *args, **kwargs)
    if forward is nn.Embedding.forward and len(args) == 1 and not kwargs:
        rest = (layer.padding_idx, layer.max_norm, layer.norm_type, layer.scale_grad_by_freq, layer.sparse)
        return F.embedding(args[0], weight, *rest)  # type: ignore[arg-type]
    call = _Call(layer, kind, _tensors(weight, bias), args, kwargs)
    return _swapped(call) if torch.compiler.is_dynamo_compiling() else _by_a_twin(call, forward)


def call_with_hooks(layer: nn.Module, forward: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """`layer(*args, **kwargs)` with `forward` instead of its own: hooks see the layer and its original arguments."""
    # Backward hooks and global hooks need the machinery of `nn.Module.__call__`: a twin is called, whose hooks get the
    # layer. Forward hooks alone are called below.
    if _has_any_global_hook() or layer._backward_hooks or layer._backward_pre_hooks:
        twin = object.__new__(type(layer))
        twin.__dict__.update(layer.__dict__, forward=forward)
        for registry in _HOOKS:
            hooks: dict[int, Any] = layer.__dict__[registry]
            calls = {key: lambda _, *rest, hook=hook: hook(layer, *rest) for key, hook in hooks.items()}
            twin.__dict__[registry] = calls
        return twin(*args, **kwargs)
    for key, hook in list(layer._forward_pre_hooks.items()):
        if key in layer._forward_pre_hooks_with_kwargs:
            changed = hook(layer, args, kwargs)
            args, kwargs = (args, kwargs) if changed is None else changed
        else:
            changed = hook(layer, args)
            args = args if changed is None else changed if isinstance(changed, tuple) else (changed,)
    output = forward(*args, **kwargs)
    for key, hook in list(layer._forward_hooks.items()):
        with_kwargs = key in layer._forward_hooks_with_kwargs
        changed = hook(layer, args, kwargs, output) if with_kwargs else hook(layer, args, output)
        output = output if changed is None else changed
    return output


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of the module runs more than its forward."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own) or bool(_has_any_global_hook())


def _transposed(layer: Any, weight: Tensor, bias: Tensor | None, input: Tensor, output_size: Any = None) -> Tensor:
    num_dims = len(layer.kernel_size)
    form = (layer.stride, layer.padding, layer.kernel_size, num_dims, layer.dilation)
    output_padding = layer._output_padding(input, output_size, *form)
    rest = (layer.stride, layer.padding, output_padding, layer.groups, layer.dilation)
    output: Tensor = _TRANSPOSED[num_dims](input, weight, bias, *rest)
    return output


def _tensors(weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}


class _Call(NamedTuple):
    """A call of a layer with `tensors` instead of its own; `kind`: its class, without parametrizations."""

    layer: nn.Module
    kind: type[nn.Module]
    tensors: dict[str, Tensor]
    args: Args
    kwargs: Kwargs

    @property
    def is_parametrized(self) -> bool:
        return self.kind is not type(self.layer)

    def other_children(self) -> dict[str, nn.Module | None]:
        """The layer's children except its parametrizations, which are already applied."""
        return {name: child for name, child in self.layer._modules.items() if name != "parametrizations"}


def _by_a_twin(call: _Call, forward: Callable[..., Any]) -> Any:
    """Call `forward` on a twin of the layer; attributes that it assigns are copied to the layer."""
    layer, tensors = call.layer, call.tensors
    twin = object.__new__(call.kind)
    attributes: dict[str, Any] = {**layer.__dict__, "_parameters": dict(layer._parameters)}
    if call.is_parametrized:
        made: Mapping[str, Any] = layer._modules["parametrizations"]._modules  # type: ignore[union-attr]
        tensors = {name: getattr(layer, name) for name in made} | tensors
        attributes["_modules"] = call.other_children()
    for name, tensor in tensors.items():
        (attributes if name in attributes else attributes["_parameters"])[name] = tensor
    twin.__dict__.update(attributes)
    output = forward(twin, *call.args, **call.kwargs)
    for name, value in twin.__dict__.items():
        if attributes.get(name, _ABSENT) is not value and name not in tensors:
            layer.__dict__[name] = value
    return output


def _patched_forward(call: _Call) -> Any:
    """Call the forward that was set on the instance."""
    forward = call.layer.__dict__.get("forward")
    if isinstance(forward, MethodType) and forward.__self__ is call.layer and not torch.compiler.is_dynamo_compiling():
        return _by_a_twin(call, forward.__func__)
    return _swapped(call)


def _swapped(call: _Call) -> Any:
    """Call the layer with its parameters swapped during the call."""
    layer = call.layer
    if call.is_parametrized:
        plain = object.__new__(call.kind)
        parameters = {**layer._parameters, "weight": None}
        plain.__dict__.update(layer.__dict__, _modules=call.other_children(), _parameters=parameters)
        layer = plain
    if torch.compiler.is_dynamo_compiling():
        return torch.func.functional_call(layer, call.tensors, call.args, call.kwargs)
    with _SWAPPING, _reparametrize_module(layer, call.tensors):
        return layer.forward(*call.args, **call.kwargs)
