"""The form of a call: which arguments of `forward` vary from call to call, and which are constants, with their values.

A graph is captured for one form. None, booleans, strings and defaults are constants, because code branches on them.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

# A parameter of `forward` that differs from call to call.
VARYING = "<varying>"
CallForm = dict[str, Any]


def call_form(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallForm:
    """The form of a call: per parameter its constant value (None, bool, str, defaults) or VARYING."""
    signature = signature_of(module)
    given = flattened(signature.bind(*args, **kwargs))
    form: CallForm = {name: value if is_constant(value) else VARYING for name, value in given.items()}
    for name, parameter in signature.parameters.items():
        if name not in given and parameter.kind is not parameter.VAR_KEYWORD:
            form[name] = () if parameter.kind is parameter.VAR_POSITIONAL else parameter.default
    return form


def same_form(one: CallForm, other: CallForm) -> bool:
    return one.keys() == other.keys() and all(same_constant(one[name], other[name]) for name in one)


def same_constant(value: Any, constant: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(constant, torch.Tensor):
        return value is constant
    return value is constant or (type(value) is type(constant) and bool(value == constant))


def is_constant(value: Any) -> bool:
    return value is None or isinstance(value, (bool, str)) or (isinstance(value, (tuple, dict)) and not value)


def flattened(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Arguments by name, those taken by `**kwargs` among the others."""
    given = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given.update(given.pop(name, {}))
    return given


def signature_of(module: nn.Module) -> inspect.Signature:
    return inspect.signature(module.forward)


def has_forward(module: nn.Module) -> bool:
    """Whether the module has Python code that a call runs: of its class, or set on the module itself."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__
