"""A copy of a model that shares no state that a forward or a training step could change.

`copy.deepcopy` alone is not enough: it keeps functions as they are, so that a `forward` or a hook that was put onto an
instance goes on calling the layers of the original, as weak references do, and it refuses tensors with a gradient
history. After the deep copy, `_Rebinder` makes copies of such functions whose closures, defaults and globals refer to
the copied modules.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from sparsebit.errors import CaptureError
from sparsebit.graph.values.code import names_in

_CONTAINERS = (list, tuple, set, frozenset, dict)
_REGISTRIES = nn.Module().__dict__.keys()
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def copy_model(model: nn.Module, *, share_parameters: bool = False, share: Iterable[object] = ()) -> nn.Module:
    """A deep copy. Functions on instances (a patched `forward`, hooks) call the copy's layers, not the original's.

    Hooks with an attribute `stays_behind` that is true (masks of pruned weights) are not in the copy.

    `share_parameters`: the copy reads the very same parameters, and has buffers and other state of its own: cheap, and
    enough to run a forward without effects on the original. `share`: other objects that are shared, not copied.
    """
    memo: dict[int, Any] = {id(part): part for part in share}
    if share_parameters:
        memo.update({id(parameter): parameter for parameter in model.parameters()})
    memo.update(without_history(model))
    memo.update(_empty_containers(model))
    try:
        # In inference mode the copies could not require a gradient; with gradients on, the parameters of a
        # ScriptModule's copy would pass theirs to the original's.
        with torch.inference_mode(False), torch.no_grad():
            copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and the original is never "
            "changed; make copy.deepcopy(model) work: no locks, open files or generators in it"
        ) from error
    for original, twin in zip(model.parameters(), copied.parameters(), strict=True):
        if twin.is_leaf and twin.requires_grad != original.requires_grad:
            twin.requires_grad_(original.requires_grad)
    rebind_functions(model.modules(), copied.modules(), memo)
    for module in copied.modules():
        for hooks in (module._forward_pre_hooks, module._state_dict_pre_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "stays_behind", False)]:
                del hooks[key]
    if not share_parameters:
        for original, twin in zip(model.parameters(), copied.parameters(), strict=True):
            if twin is not original:
                for hook in (original._backward_hooks or {}).values():
                    twin.register_hook(hook)
                for hook in (original._post_accumulate_grad_hooks or {}).values():
                    twin.register_post_accumulate_grad_hook(hook)
    return copied


def uncompiled(model: nn.Module) -> nn.Module:
    """`model` without the wrappers of `torch.compile` and of data-parallel training, whose names are in every path.

    The code of a compiled module cannot be traced. Where modules inside are wrapped, it is a copy that shares the
    parameters.
    """
    model = _unwrapped(model)
    if all(_unwrapped(module) is module for module in model.modules()):
        return model
    copied = copy_model(model, share_parameters=True)
    for module in list(copied.modules()):
        for name, child in module.named_children():
            if _unwrapped(child) is not child:
                module._modules[name] = _unwrapped(child)
    return copied


def _unwrapped(module: nn.Module) -> nn.Module:
    is_parallel = isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel))
    original = module.module if is_parallel else getattr(module, "_orig_mod", module)
    return _unwrapped(original) if isinstance(original, nn.Module) and original is not module else module


def without_history(model: nn.Module) -> dict[int, torch.Tensor]:
    """Copies, by the id of the original, of the tensors that `copy.deepcopy` refuses: those with a gradient history
    that a module keeps as an attribute (for example the weight that an old `weight_norm` computes).
    """
    values = (value for module in model.modules() for value in _leaves(module.__dict__))
    computed = (value for value in values if isinstance(value, torch.Tensor) and not value.is_leaf)
    return {id(tensor): tensor.detach().clone() for tensor in computed}


def _empty_containers(model: nn.Module) -> dict[int, Any]:
    """Copies, by the id of the original, of modules' empty containers (hooks), which are most of what is copied."""
    return {
        id(value): type(value)()
        for module in model.modules()
        for value in module.__dict__.values()
        if type(value) in (dict, OrderedDict, list, set) and not value
    }


def is_held(root: nn.Module, part: nn.Module) -> bool:
    """Whether a module of `root` holds the part in an attribute, registered or not, so that it is copied with it."""
    return any(value is part for module in root.modules() for value in _leaves(vars(module)))


def _leaves(value: Any, depth: int = 4) -> Iterator[Any]:
    """The contents of plain containers, a few levels down."""
    if isinstance(value, _CONTAINERS) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item, depth - 1)
    else:
        yield value


def rebind_functions(originals: Iterable[nn.Module], copies: Iterable[nn.Module], memo: dict[int, Any]) -> None:
    """Make functions on instances of `copies` that refer to `originals` refer to the copies. `memo`: deepcopy's."""
    rebinder = _Rebinder(list(originals), memo)
    for module in copies:
        for name, value in list(module.__dict__.items()):
            if name in _HOOKS:
                value.update({key: rebinder.twin(hook) for key, hook in value.items()})
            elif name not in _REGISTRIES and (twin := rebinder.twin(value)) is not value:
                module.__dict__[name] = twin


class _Rebinder:
    def __init__(self, modules: list[nn.Module], memo: dict[int, Any]) -> None:
        tensors = [t for m in modules for registry in (m._parameters, m._buffers) for t in registry.values()]
        self.twins = {id(part): memo[id(part)] for part in (*modules, *tensors) if id(part) in memo}
        self.done: dict[int, Any] = {}
        parts = [part for part in (*modules, *tensors) if part is not None]
        self.references = {id(reference): part for part in parts for reference in weakref.getweakrefs(part)}

    def twin(self, value: Any, depth: int = 4) -> Any:
        """`value` with every part of the original in it replaced; the same object where there is none."""
        if id(value) in self.twins:
            return self.twins[id(value)]
        if id(value) in self.references:
            twin = self.twins.get(id(self.references[id(value)]))
            make = weakref.ref if isinstance(value, weakref.ref) else weakref.proxy
            return value if twin is None else make(twin)
        if isinstance(value, types.FunctionType):
            if id(value) not in self.done:
                self.done[id(value)] = value  # a function may refer to itself
                self.done[id(value)] = self._function(value)
            return self.done[id(value)]
        if isinstance(value, types.MethodType):
            function, owner = self.twin(value.__func__), self.twin(value.__self__)
            is_same = function is value.__func__ and owner is value.__self__
            return value if is_same else types.MethodType(function, owner)
        if type(value) is functools.partial:
            parts = value.func, value.args, value.keywords
            function, args, kwargs = twins = tuple(map(self.twin, parts))
            is_same = all(twin is part for twin, part in zip(twins, parts, strict=True))
            return value if is_same else functools.partial(function, *args, **kwargs)
        if type(value) not in _CONTAINERS or not depth:
            return value
        if isinstance(value, dict):
            pairs = {key: self.twin(item, depth - 1) for key, item in value.items()}
            return pairs if any(pairs[key] is not value[key] for key in pairs) else value
        items = [self.twin(item, depth - 1) for item in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells = tuple(self._cell(cell) for cell in function.__closure__ or ())
        defaults, keywords = self.twin(function.__defaults__), self.twin(function.__kwdefaults__)
        names = self.twin({name: function.__globals__.get(name) for name in names_in(function.__code__)})
        overridden = {name: item for name, item in names.items() if item is not function.__globals__.get(name)}
        is_same = defaults is function.__defaults__ and keywords is function.__kwdefaults__ and not overridden
        if is_same and all(a is b for a, b in zip(cells, function.__closure__ or (), strict=True)):
            return function
        namespace = _Overridden(function.__globals__, overridden) if overridden else function.__globals__
        twin = types.FunctionType(function.__code__, namespace, function.__name__, defaults, cells or None)
        twin.__kwdefaults__ = keywords
        twin.__dict__.update(function.__dict__)
        for name in ("__doc__", "__module__", "__qualname__", "__annotations__"):
            setattr(twin, name, getattr(function, name))
        return twin

    def _cell(self, cell: types.CellType) -> types.CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            return cell
        twin = self.twin(content)
        return cell if twin is content else types.CellType(twin)


class _Overridden(dict[str, Any]):
    """A function's globals with some names replaced; all others are read from the real ones at the time of use."""

    def __init__(self, real: dict[str, Any], overridden: dict[str, Any]) -> None:
        super().__init__(overridden, __builtins__=real["__builtins__"])
        self.real = real

    def __missing__(self, name: str) -> Any:
        return self.real[name]
