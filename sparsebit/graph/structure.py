"""The structure of captured graphs as lines of text: ops, literals and connections, without weights and input sizes.

The lines are the same in every process and on every machine. Two models with the same lines compute the same function
of their inputs and tensors, on the captured path. Modules that run their own code are listed with a digest of it.

A saved model contains the lines, and loading compares them with those of the model that is given: another forward would
use the saved scales for other tensors. So lines must not depend on anything that may differ between the two without a
change of the function: weights, devices, comments, versions of Python.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import inspect
import io
import re
import tokenize
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.graph.capture import Captured
from sparsebit.graph.nodes.example import guard
from sparsebit.graph.nodes.graph_module import NAME_KEY, CapturedGraph, source_path
from sparsebit.graph.region import Region
from sparsebit.graph.state.code_reads import settings_of
from sparsebit.graph.values.call_form import has_forward
from sparsebit.graph.values.code import function_of, is_foreign

Structure = Mapping[str, Sequence[str]]
OWN_CODE, SETTINGS = "own code", "settings"
UNKNOWN = "unknown"
_NUM_SHOWN = 3
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, functools.partial)
_SETTINGS = (bool, int, float, str, tuple, list, dict, torch.dtype, Tensor, *_FUNCTIONS)
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d+)?")
# Attributes that only matter in training, or that change memory and not values.
_WITHOUT_EFFECT = ("training", "momentum", "inplace")


def structure_of(captured: Captured, source: nn.Module) -> dict[str, list[str]]:
    """The lines of each graph, by its path. Must be called before passes change the graphs.

    Under `OWN_CODE`: digests of modules that run their own code; under `SETTINGS`: the plain values of these modules
    and of layers that no graph calls. `source`: the captured model's own code.
    """
    lines = {path or ".": _lines(region.graph_module) for path, region in captured.regions.items()}
    traced, listed = set[str](), set[str]()
    for path, region in captured.regions.items():
        traced |= {f"{path}.{inner}".strip(".") for inner in region.graph_module.meta["traced_through"]}
        called = region.graph_module.graph.find_nodes(op="call_module")
        listed |= {f"{path}.{source_path(str(node.target))}".strip(".") for node in called}
    others = {path: module for path, module in _modules_of(source) if path not in traced and has_forward(module)}
    own = {path: module for path, module in others.items() if _is_users(module) or _hooks_of(module)}
    lines[OWN_CODE] = [f"{path or '.'}: {_code_digest(module)}" for path, module in own.items()]
    alone = {path: module for path, module in others.items() if _is_users(module) or path not in listed}
    lines[SETTINGS] = [f"{path or 'the model'}: {_settings(module)}" for path, module in alone.items()]
    return lines


def _modules_of(source: nn.Module, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Every module by its first path; in place of a region, the module that it was traced from."""
    seen = set() if seen is None else seen
    module = source.source if isinstance(source, Region) else source
    if id(module) not in seen:
        seen.add(id(module))
        yield path, module
        for name, child in module._modules.items():
            if child is not None:
                yield from _modules_of(child, f"{path}.{name}".strip("."), seen)


def difference(saved: Structure, now: Structure) -> str:
    """The differences in a few lines; empty if there are none."""
    found: list[str] = []
    for path in dict.fromkeys([*saved, *now]):
        before, after = saved.get(path, ()), now.get(path, ())
        if path == OWN_CODE:
            found += _changed_code(before, after)
            continue
        where = "" if path in (".", SETTINGS) else f"in {path}: "
        steps = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes() if before != after else ()
        for kind, first, last, start, end in steps:
            if kind != "equal":
                found.append(f"{where}saved {_shown(before[first:last])}, given {_shown(after[start:end])}")
    more = f"\n  and {len(found) - _NUM_SHOWN} more" if len(found) > _NUM_SHOWN else ""
    return "\n".join(f"  {line}" for line in found[:_NUM_SHOWN]) + more


def _shown(lines: Sequence[str]) -> str:
    more = f" and {len(lines) - _NUM_SHOWN} more" if len(lines) > _NUM_SHOWN else ""
    return "; ".join(f"`{line}`" for line in lines[:_NUM_SHOWN]) + more if lines else "nothing"


def _changed_code(saved: Sequence[str], now: Sequence[str]) -> list[str]:
    before, after = (dict(line.rsplit(": ", 1) for line in lines) for lines in (saved, now))
    return [
        f"{'the model' if path == '.' else path} runs its own code, and that differs from the saved model's"
        for path in dict.fromkeys([*before, *after])
        if UNKNOWN not in (before.get(path), after.get(path)) and before.get(path) != after.get(path)
    ]


# --- graphs


def _lines(root: CapturedGraph) -> list[str]:
    names: dict[fx.Node, str] = {}
    lines: list[str] = []
    for node in root.graph.nodes:
        if node.target is guard:
            continue
        if node.op == "placeholder":
            names[node] = f"input{len(lines)}"
            lines.append(names[node])
            continue
        names[node] = str(node.meta.get(NAME_KEY, node.name))
        given = [_text(argument, names) for argument in node.args]
        given += [f"{key}={_text(value, names)}" for key, value in node.kwargs.items()]
        lines.append(f"{names[node]} = {_operation(node, root)}({', '.join(given)})")
    return lines


def _operation(node: fx.Node, root: CapturedGraph) -> str:
    target = str(node.target)
    if node.op == "call_module":
        return f"{source_path(target)}: {_layer(root.get_submodule(target))}"
    if node.op == "get_attr":
        owner, _, name = target.rpartition(".")
        value = getattr(root.get_submodule(owner), name)
        is_constant = name.startswith("_tensor_constant") and isinstance(value, Tensor)
        return f"constant {_values(value)}" if is_constant else f"read {source_path(target)}"
    if node.op == "call_method":
        return f".{target}"
    return target if node.op == "output" else str(getattr(node.target, "__name__", type(node.target).__name__))


def _layer(module: nn.Module) -> str:
    """A layer of torch with its settings; a user's module by its class alone, as its code is in the digest."""
    kind = type(module).__name__
    if _is_users(module):
        return kind
    left_out = (*_WITHOUT_EFFECT, "p") if "Dropout" in kind else _WITHOUT_EFFECT
    names = [name for name in sorted(vars(module)) if not name.startswith("_") and name not in left_out]
    return f"{kind}({_values_of(module, names)})"


def _settings(module: nn.Module) -> str:
    """As `_layer`; for a user's module, the values that its code reads and sets only in `__init__`."""
    if not _is_users(module):
        return _layer(module)
    names = settings_of(type(module))
    return f"({_values_of(module, [name for name in sorted(vars(module)) if name in names])})"


def _values_of(module: nn.Module, names: Sequence[str]) -> str:
    held = {name: vars(module)[name] for name in names if name not in _WITHOUT_EFFECT}
    shown = {name: value for name, value in held.items() if isinstance(value, _SETTINGS)}
    for name in [name for name, value in shown.items() if isinstance(value, Tensor)]:
        if any(parameter.startswith(f"{name}_") for parameter in module._parameters):
            del shown[name]  # a hook computes it: `weight` from `weight_orig`, or from `weight_g`
    return ", ".join(f"{name}={_text(value, {})}" for name, value in shown.items())


def _text(value: Any, names: Mapping[fx.Node, str]) -> str:
    """A literal or an argument as text; objects without a stable text by their class, every device as "device"."""
    if isinstance(value, fx.Node):
        return names.get(value, value.name)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_text(item, names) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(item, names)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        return ":".join(_text(part, names) for part in (value.start, value.stop, value.step))
    if isinstance(value, torch.device) or (isinstance(value, str) and _DEVICE.fullmatch(value)):
        return "device"
    if isinstance(value, Tensor):
        return _values(value)
    if isinstance(value, functools.partial):
        return f"{_text(value.func, names)}{_text(value.args, names)}{_text(value.keywords, names)}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, type(...))):
        return repr(value)
    return str(getattr(value, "__name__", type(value).__name__))


def _values(tensor: Tensor) -> str:
    """Shape, type and a few rounded statistics, because the last bits of computed constants differ between machines."""
    shape = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if not tensor.numel() or tensor.is_meta or tensor.is_complex() or tensor.layout is not torch.strided:
        return shape
    values = torch.nan_to_num(tensor.detach().double().flatten(), nan=0, posinf=1, neginf=-1)
    places = torch.arange(1, values.numel() + 1, dtype=torch.float64, device=values.device)
    size = float(values.abs().sum())
    sums = (values.sum(), (values * places).sum() / values.numel(), (values * places.square().sin()).sum())
    return " ".join([shape, f"{size:.4g}", *(f"{float(value) / max(size, 1e-30) + 0.0:.4f}" for value in sums)])


# --- own code


def _is_users(module: nn.Module) -> bool:
    return not is_foreign(type(module))


def _hooks_of(module: nn.Module) -> list[types.FunctionType]:
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    functions = [function_of(hook) or function_of(type(hook).__call__) for hook in hooks]
    return [function for function in functions if function is not None and not is_foreign(function)]


def _code_digest(module: nn.Module) -> str:
    """A digest of the methods of the user's classes, and of hooks; ignores comments, blank lines and docstrings."""
    digest = hashlib.sha256()
    functions = [(hook.__name__, hook) for hook in _hooks_of(module)]
    for base in type(module).__mro__:
        members = {} if is_foreign(base) else vars(base)
        methods = (name for name in sorted(members) if not name.startswith("__") or name == "__call__")
        functions += [(name, function) for name in methods if (function := function_of(members[name]))]
    try:
        for name, function in functions:
            digest.update(f"{name}\n{_tokens(inspect.getsource(function))}\n".encode())
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return UNKNOWN
    return digest.hexdigest()[:16]


def _tokens(code: str) -> str:
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(code).readline) if token.type not in ignored]
    kept: list[str] = []
    for before, token, after in zip([None, *tokens], tokens, [*tokens[1:], None], strict=False):
        starts_line = before is None or before.type == tokenize.NEWLINE
        is_docstring = token.type == tokenize.STRING and starts_line and after and after.type == tokenize.NEWLINE
        kept.append("" if is_docstring else token.string.strip() or "\n")
    return " ".join(kept)
