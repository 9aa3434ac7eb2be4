"""`isinstance(x, Tensor)`, `type(x)`, `hasattr(x, "shape")` in a model's code, answered for the traced value.

A traced value is an object of another class. While a trace runs, the model's Python modules therefore see these
builtins in a form that knows traced values; torch's own modules and ours do not. Each answer that another input could
change becomes a guard. The builtins are replaced by names in the modules' globals, because a name is looked up there
before it is looked up in `builtins`: so no other code of the process sees them.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from sparsebit.graph.state.training_flag import TrainingFlag
from sparsebit.graph.tracing.proxies import class_of, has_attribute

_OURS = (os.path.dirname(torch.__file__) + os.sep, str(Path(__file__).parents[2]) + os.sep)  # torch, the whole package
_STDLIB, _SITE = (sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib"))
# Code of no model, thousands of modules: what torch, exporters, runtimes, test runners and command lines are made of.
_OF_NO_MODEL = frozenset({
    "sympy", "mpmath", "networkx", "jinja2", "fsspec", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "openvino",
    "triton", "ml_dtypes", "scipy", "sklearn", "joblib", "narwhals", "_pytest", "pytest", "pluggy", "hypothesis",
    "playwright", "pydantic", "rich", "pygments", "typer", "click", "yaml", "huggingface_hub", "tokenizers",
})  # fmt: skip
_MISSING = object()


@contextlib.contextmanager
def traced_builtins(tracer: Any, root: nn.Module) -> Iterator[None]:
    """Inside, these builtins answer for traced values in modules that are neither torch's, Python's nor Sparsebit's."""
    replacements = _replacements(tracer)
    _, modules = _users_modules(tuple(map(id, list(sys.modules.values()))))
    spaces = {id(space): space for space in (*modules, *_namespaces(root))}.values()
    given = [
        (space, replacements)
        if space.keys().isdisjoint(replacements)  # nearly all, and thousands in a large program
        else (space, {k: v for k, v in replacements.items() if k not in space})
        for space in spaces
    ]
    is_tensor = torch.is_tensor
    try:
        for space, names in given:
            space.update(names)
        torch.is_tensor = lambda obj: replacements["isinstance"](obj, torch.Tensor)  # type: ignore[assignment]
        yield
    finally:
        torch.is_tensor = is_tensor
        for space, names in given:
            for name in names:
                space.pop(name, None)


@functools.lru_cache(maxsize=1)
def _users_modules(ids: tuple[int, ...]) -> tuple[list[Any], list[dict[str, Any]]]:
    """All modules in `sys.modules`, and the namespaces of the user's among them.

    `ids`: the modules' ids, as the key of the cache. The result keeps the modules alive, so that no id is used again.
    """
    loaded = list(sys.modules.values())
    return loaded, [vars(module) for module in loaded if _is_users(module)]


def _namespaces(root: nn.Module) -> Iterator[dict[str, Any]]:
    """The globals of the model's own methods: code that was executed from a string is in no module."""
    for base in {base for module in root.modules() for base in type(module).__mro__}:
        for member in vars(base).values():
            if isinstance(member, types.FunctionType) and _is_users_file(member.__globals__.get("__file__", "")):
                yield member.__globals__


def _is_users(module: Any) -> bool:
    space = getattr(module, "__dict__", None)
    if type(space) is not dict or str(space.get("__name__")).partition(".")[0] in _OF_NO_MODEL:
        return False
    file = space.get("__file__")
    return _is_users_file(file) if isinstance(file, str) else space.get("__name__") == "__main__"


def _is_users_file(file: str) -> bool:
    in_stdlib = file.startswith(_STDLIB) and not file.startswith(_SITE)
    return not in_stdlib and not file.startswith(_OURS)


def _replacements(tracer: Any) -> dict[str, Any]:
    def asked(obj: Any) -> bool:
        return isinstance(obj, (fx.Proxy, TrainingFlag)) and tracer.is_tracing_here()

    def isinstance_(obj: Any, classes: Any, /) -> bool:
        if not asked(obj) or classes is fx.Proxy:  # code that knows traces asks for these by name
            return isinstance(obj, classes)
        return issubclass(class_of(tracer, obj), classes) or any(_is_of_type(obj, kind) for kind in _flat(classes))

    def hasattr_(obj: Any, name: str, /) -> bool:
        return has_attribute(tracer, obj, name) if asked(obj) else hasattr(obj, name)

    def getattr_(obj: Any, name: str, default: Any = _MISSING, /) -> Any:
        if default is _MISSING:
            return getattr(obj, name)
        return getattr(obj, name, default) if not asked(obj) or has_attribute(tracer, obj, name) else default

    def callable_(obj: Any, /) -> bool:
        return any("__call__" in vars(base) for base in class_of(tracer, obj).__mro__) if asked(obj) else callable(obj)

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs and asked(args[0]):
                return class_of(tracer, args[0])
            return builtins.type(*args, **kwargs)

        def __instancecheck__(cls, obj: Any) -> bool:
            return isinstance(obj, builtins.type)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, builtins.type)

        def __eq__(cls, other: object) -> bool:
            return other is builtins.type or other is cls

        def __hash__(cls) -> int:
            return hash(builtins.type)

    type_ = Meta("type", (builtins.type,), {})
    return {
        "isinstance": isinstance_, "hasattr": hasattr_, "getattr": getattr_, "callable": callable_, "type": type_
    }  # fmt: skip


def _flat(classes: Any) -> list[Any]:
    """The classes of a second argument of `isinstance`."""
    if isinstance(classes, tuple):
        return [kind for item in classes for kind in _flat(item)]
    return list(classes.__args__) if isinstance(classes, types.UnionType) else [classes]


def _is_of_type(value: Any, kind: Any) -> bool:
    """Whether a traced tensor is of a class like `torch.FloatTensor`, which means a dtype on a device."""
    if not isinstance(kind, builtins.type(torch.FloatTensor)) or isinstance(value, TrainingFlag):
        return False
    return bool(value.dtype == kind.dtype) and bool(value.is_cuda == kind.is_cuda) and bool(value.layout == kind.layout)
