"""Reads an ONNX file of unknown origin: its messages, its external data and its local functions, each checked first.

A file may be truncated, may name data outside its folder, or may hold a few bytes that unfold to more nodes or numbers
than any machine holds. Each such file ends in a DeploymentError; nothing outside of the file's folder is opened.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsebit.deploy.onnx_graph.model_file import need_file
from sparsebit.deploy.onnx_graph.packages import onnx
from sparsebit.deploy.onnx_graph.qdq_graph import opset, stored_bytes
from sparsebit.errors import DeploymentError

OPSETS = range(11, 27)
MOST_NODES = 1_000_000  # also after local functions are inlined
LARGEST_CONSTANT = 1 << 31  # numbers in one tensor


def read_model(path: str | os.PathLike[str]) -> Any:
    """The ModelProto of a float or quantized file, with its data in memory and its local functions inlined."""
    need_file(path)
    try:
        model = onnx.load(os.fspath(path), load_external_data=False)
    except Exception as error:  # protobuf's exception classes differ by version
        raise DeploymentError(f"{path} is not an ONNX file, or it is truncated: {_first_line(error)}") from None
    if not model.graph.node:
        raise DeploymentError(f"{path} is not an ONNX file, or its graph has no nodes")
    _check_opset(model, path)
    _read_tensors(model, Path(path))
    return _inlined(model, path)


def _check_opset(model: Any, path: str | os.PathLike[str]) -> None:
    version = opset(model)
    if version not in OPSETS:
        raise DeploymentError(
            f"{path}: its operators are of opset {version}; allowed: {OPSETS[0]} to {OPSETS[-1]}. Convert it with "
            f"onnx.version_converter.convert_version(model, {min(max(version, 17), 21)})"
        )


def _read_tensors(model: Any, path: Path) -> None:
    """Check the size of every stored tensor, and read those that are in other files."""
    for tensor in _tensors(model):
        shape = list(tensor.dims)
        count = math.prod(shape)
        where = f"{path}: its tensor {tensor.name!r} of shape {shape}"
        if any(size < 0 for size in shape) or count > LARGEST_CONSTANT:
            raise DeploymentError(f"{where} has an impossible size")
        wanted = stored_bytes(tensor.data_type, count)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            if wanted is None:
                raise DeploymentError(f"{where} is of the unknown type {tensor.data_type}")
            tensor.raw_data = _external_bytes(tensor, path.parent, wanted, where)
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
        elif tensor.HasField("raw_data") and wanted not in (None, len(tensor.raw_data)):
            raise DeploymentError(f"{where} is damaged: it has {len(tensor.raw_data)} bytes, not {wanted}")


def _tensors(model: Any) -> Iterator[Any]:
    """Initializers, and tensors in attributes; those of subgraphs are not read, since subgraphs are refused."""
    yield from model.graph.initializer
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    for node in nodes:
        for item in node.attribute:
            if item.HasField("t"):
                yield item.t


def _external_bytes(tensor: Any, folder: Path, wanted: int, where: str) -> bytes:
    """The bytes of a tensor that is stored in another file of the same folder, or of a folder below it."""
    entries = {item.key: item.value for item in tensor.external_data}
    name = entries.get("location", "")
    file = _inside(folder, name, where)
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", wanted))
    except ValueError:
        raise DeploymentError(f"{where}: its offset or length in {name!r} is not a number") from None
    size = file.stat().st_size
    if length != wanted or offset < 0 or offset + length > size:
        raise DeploymentError(
            f"{where} needs {wanted} bytes; it names {length} bytes from byte {offset} of {name!r}, which has {size}"
        )
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(wanted)


def _inside(folder: Path, name: str, where: str) -> Path:
    """The file of this name, if it is in the folder also after links are followed."""
    root = folder.resolve()
    outside = not name or "\0" in name or os.path.isabs(name) or re.match(r"^[A-Za-z]:", name) is not None
    file = root if outside else (root / name).resolve()
    if outside or not file.is_relative_to(root):
        raise DeploymentError(
            f"{where} names the data file {name!r}, which is outside of the model's folder; it was not opened. Save "
            "the model again with its data next to it: onnx.save(model, path, save_as_external_data=True)"
        )
    if not file.is_file():
        raise DeploymentError(f"{where} is stored in {name!r}, and {root} has no such file; copy it there")
    return file


def _inlined(model: Any, path: str | os.PathLike[str]) -> Any:
    """The model without local functions; refused before inlining if they call themselves or unfold without end."""
    _check_expansion(model, path)
    if not model.functions:
        return model
    from onnx import inliner

    try:
        return inliner.inline_local_functions(model)
    except Exception as error:  # the checker's own exception classes differ by version
        raise DeploymentError(f"{path}: its local functions cannot be inlined: {_first_line(error)}") from None


def _check_expansion(model: Any, path: str | os.PathLike[str]) -> None:
    """Raise if the graph has more than `MOST_NODES` nodes after all local functions are inlined."""
    functions = {(function.domain, function.name): function for function in model.functions}
    counts: dict[tuple[str, str], int] = {}
    remaining = dict(functions)
    while remaining:  # a function can be counted when all that it calls are; a cycle never can
        ready = {
            key: function
            for key, function in remaining.items()
            if all((n.domain, n.op_type) in counts or (n.domain, n.op_type) not in functions for n in function.node)
        }
        if not ready:
            names = ", ".join(name for _, name in list(remaining)[:3])
            raise DeploymentError(f"{path}: its local functions call themselves ({names}), so they have no end")
        for key, function in ready.items():
            counts[key] = sum(counts.get((n.domain, n.op_type), 1) for n in function.node)
            del remaining[key]
    total = sum(counts.get((node.domain, node.op_type), 1) for node in model.graph.node)
    if total > MOST_NODES:
        raise DeploymentError(f"{path} unfolds to {total} nodes; at most {MOST_NODES} are read")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
