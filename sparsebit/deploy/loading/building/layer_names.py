"""Names of layers and parameters from the names in a file: module paths where the file has them.

Exporters leave the path of a PyTorch module in three places: in the name of its weight (`layer1.0.conv1.weight`), in
the metadata of its node (`pkg.torch.onnx.name_scopes`), and in the name of its node (`/layer1/layer1.0/conv1/Conv`).
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterable
from typing import Any

from torch import fx, nn

_SCOPES = "pkg.torch.onnx.name_scopes"
_LONGEST = 2000  # characters of metadata that are parsed, and of names that are kept
_NOT_IN_NAMES = re.compile(r"[^0-9A-Za-z_]+")
_ANONYMOUS = re.compile(r"^(onnx::|val_\d|_?tensor_constant|\d|[^./]*$)")  # written by an exporter, not by a person
# `class`, and what the code of a GraphModule reads: an argument of that name would hide it.
_OF_CODE = frozenset([*keyword.kwlist, "self", "torch", "getattr", "slice", "device", "inf", "nan", "NoneType"])
# `forward`, `training`, `__class__`: attributes that every module has.
_TAKEN = frozenset([*dir(fx.GraphModule(nn.Module(), fx.Graph())), *keyword.kwlist])
_LAST_PART = re.compile(r"[._/](weight|bias|kernel|gamma|beta|scale|W|w|B|b)$")


def layer_path(node: Any, parameters: Iterable[str]) -> str:
    """The path of the layer that a node with these parameters becomes; not empty, and not yet unique."""
    for name in parameters:
        if _LAST_PART.search(name) and not _ANONYMOUS.match(name):
            return as_path(_LAST_PART.sub("", name))
    return _scope(node) or _from_node_name(node) or as_path(node.name or node.op_type)


def as_path(name: str) -> str:
    """A name of the file as a module path: parts between dots that are valid in attribute names."""
    parts = [_NOT_IN_NAMES.sub("_", part) for part in re.split(r"[./]", name[:_LONGEST]) if part]
    return ".".join(f"{part}_" if part in _TAKEN else part for part in parts) or "unnamed"


def argument_name(name: str) -> str:
    """A name of an input as that of an argument of `forward`."""
    word = _NOT_IN_NAMES.sub("_", name[:_LONGEST])
    word = word if word.isidentifier() else f"_{word}"  # 1 -> _1
    return f"{word}_" if word in _OF_CODE else word


def _scope(node: Any) -> str:
    """The innermost module in whose forward the node was exported, from the metadata of torch.onnx.export."""
    text = next((item.value for item in node.metadata_props if item.key == _SCOPES), "")
    if not text or len(text) > _LONGEST:
        return ""
    try:
        scopes = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ""
    modules = [scope for scope in scopes[:-1] if isinstance(scope, str) and scope] if isinstance(scopes, list) else []
    return as_path(modules[-1]) if modules else ""


def _from_node_name(node: Any) -> str:
    """`/layer1/layer1.0/conv1/Conv` -> `layer1.0.conv1`: a part that repeats the one before it replaces that one."""
    parts = [part for part in node.name[:_LONGEST].split("/") if part]
    is_path = len(parts) > 1 or "." in node.name
    if len(parts) > 1 and re.fullmatch(rf"{re.escape(node.op_type)}(_\d+)?", parts[-1]):
        parts = parts[:-1]
    kept: list[str] = []
    for part in parts:
        if kept and part.startswith(f"{kept[-1]}."):
            kept[-1] = part
        else:
            kept.append(part)
    return as_path(".".join(kept)) if is_path else ""
