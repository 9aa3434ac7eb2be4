"""Tensors to and from safetensors files, without numpy, and checksums of them."""

from __future__ import annotations

import ctypes
import hashlib
import math
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from sparsebit.errors import CheckpointError


def without_ties(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once; further names of the same memory (tied weights) are aliases of the first."""
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else (name,)
        if first.setdefault(key, name) != name:
            aliases[name] = first[key]
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}, aliases


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """`safetensors.torch.save_file` without numpy, which the core does not require; OSError if the disk is full.

    The file gets the permissions of the user's umask: safetensors itself makes files private (0600).
    """
    path.touch()
    mode = path.stat().st_mode
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}  # must outlive the call
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in held.items()
    }
    try:
        serialize_file(specs, path, metadata=metadata)
    except SafetensorError as error:  # raised for a full disk, instead of an OSError
        raise OSError(f"{path} cannot be written ({error})") from None
    path.chmod(stat.S_IMODE(mode))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, on the CPU, and its metadata."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from None


class StoredTensor(NamedTuple):
    """A tensor as its file describes it. `dtype`: as safetensors names it, `F16`."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a file by name; only its header is read."""
    found = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                dtype, shape = str(part.get_dtype()), tuple(part.get_shape())
                found[name] = StoredTensor(dtype, shape, math.ceil(math.prod(shape) * _num_bits(dtype) / 8))
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from None
    return found


def _num_bits(dtype: str) -> int:
    """`F16`: 16, `F8_E4M3`: 8, `BOOL`: 8."""
    digits = re.match(r"[A-Z]+(\d+)", dtype)
    return int(digits[1]) if digits else 8


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and values."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.nbytes:
            found.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return found.hexdigest()
