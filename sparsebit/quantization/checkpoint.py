"""A model as a folder: `model.safetensors` (every tensor) and `sparsebit.json` (everything else that is needed).

The folder describes itself, holds no code and nothing pickled. The two files carry the same key, so that halves of
different savings are never taken for a whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from safetensors.torch import load_file
from torch import Tensor

from sparsebit.errors import CheckpointError

FORMAT = "sparsebit-quantized"
FORMAT_VERSION = 1
TENSORS, MANIFEST = "model.safetensors", "sparsebit.json"
_PLAIN = (bool, int, float, str, type(None))


def write(folder: str | os.PathLike[str], description: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Make the folder; older files of the same names are replaced, and only when the new ones are complete."""
    from sparsebit import __version__

    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; save() writes a folder: give another name")
    distinct, aliases = _distinct(tensors)
    key = secrets.token_hex(8)
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "sparsebit": __version__,
        "torch": str(torch.__version__),
        "key": key,
        **description,
        "aliases": aliases,
    }
    with _replacing(path / TENSORS) as new_tensors, _replacing(path / MANIFEST) as new_manifest:
        _save_tensors(distinct, new_tensors, {"key": key})
        new_manifest.write_text(json.dumps(manifest, indent=2) + "\n")
    return path


def read(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of a folder, checked."""
    manifest = _read_manifest(Path(folder) / MANIFEST)
    path = Path(folder) / TENSORS
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; save the model again")
    try:
        with safe_open(path, framework="pt") as file:
            key = (file.metadata() or {}).get("key")
        tensors = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged ({error}); save the model again") from None
    if key != manifest["key"]:
        raise CheckpointError(f"{path} and {MANIFEST} come from different savings; save the model again")
    return manifest, tensors | {name: tensors[other] for name, other in manifest["aliases"].items()}


def encode(value: Any) -> Any:
    """A nest of tensors as JSON, without their data: `{"tensor": [2, 3], "dtype": "float32"}`.

    Gives None for what has no such form.
    """
    try:
        return _encode(value)
    except TypeError:
        return None


def decode(value: Any) -> Any:
    """The nest that `encode` was given, with tensors on the meta device."""
    if value is None:
        return None
    kind = next(iter(value))
    if kind == "tensor":
        return torch.empty(value["tensor"], dtype=getattr(torch, value["dtype"]), device="meta")
    if kind == "dict":
        return {name: decode(item) for name, item in value["dict"].items()}
    if kind in ("tuple", "list"):
        return {"tuple": tuple, "list": list}[kind](decode(item) for item in value[kind])
    return value["value"]


def _encode(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {"tensor": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if type(value) is dict and all(isinstance(name, str) for name in value):
        return {"dict": {name: _encode(item) for name, item in value.items()}}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_encode(item) for item in value]}
    if type(value) in _PLAIN:
        return {"value": value}
    raise TypeError(type(value))


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} holds no {MANIFEST}; give a folder that QuantModel.save() wrote")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); save the model again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a sparsebit checkpoint; give a folder that QuantModel.save() wrote")
    if manifest.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {manifest.get('version')}; this sparsebit reads version {FORMAT_VERSION}"
        )
    missing = {"key", "config", "example", "switches", "sites", "aliases", "folded_layers"} - manifest.keys()
    if missing:
        raise CheckpointError(f"{path} is damaged ({', '.join(sorted(missing))} missing); save the model again")
    return manifest


def _save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """`safetensors.torch.save_file` without numpy, which the core does without."""
    held = {name: tensor.cpu() for name, tensor in tensors.items()}  # their memory must outlive the call
    serialize_file(
        {
            name: TensorSpec(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=list(tensor.shape),
                data_ptr=tensor.data_ptr(),
                data_len=tensor.nbytes,
            )
            for name, tensor in held.items()
        },
        path,
        metadata=metadata,
    )


def _distinct(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors that share memory (tied weights) once, the other names as aliases of the first."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else (name,)
        if key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            tensors[name] = tensor.detach().contiguous().clone()
    return tensors, aliases


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A name to write to; it becomes `path` if all goes well, and nothing is left of it otherwise."""
    folders = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
