"""`SharedData`: keeps values by key within a budget of bytes: on their device, else on the host, else on disk."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.graph.values.nested import map_nested

MIB = 1 << 20
_MEMINFO = Path("/proc/meminfo")


def default_memory_budget() -> int:
    """The default number of bytes of values in memory: half of the free memory, at least 1 GiB, at most 8 GiB."""
    free = 0
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return min(max(free // 2, 1024 * MIB), 8192 * MIB)


@dataclass(frozen=True)
class _Stored:
    """One tensor's place: `where` is the tensor itself, or the file that holds it."""

    where: Tensor | Path
    device: torch.device
    size: int


class SharedData:
    """A dictionary of nested tensors that never holds more than its budgets in memory.

    A value that does not fit the device's budget goes to the host, one that does not fit the host's to a temporary
    folder. The result of `get` may be the stored tensor itself: write into a copy.
    """

    def __init__(self, *, device_bytes: int = 1024 * MIB, host_bytes: int = 1024 * MIB) -> None:
        self.device_budget, self.host_budget = device_bytes, host_bytes
        self.device_bytes = self.host_bytes = self.disk_bytes = 0
        self._entries: dict[Hashable, Any] = {}
        self._folder: Path | None = None
        self._count = 0

    def put(self, key: Hashable, value: Any) -> None:
        self.drop(key)
        self._entries[key] = map_nested(Tensor, self._place, value)

    def get(self, key: Hashable) -> Any:
        return map_nested(_Stored, _fetch, self._entries[key])

    def drop(self, key: Hashable) -> None:
        map_nested(_Stored, self._release, self._entries.pop(key, None))

    def clear(self) -> None:
        for key in list(self._entries):
            self.drop(key)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedData:
        """A separate store, because files have one owner."""
        copied = SharedData(device_bytes=self.device_budget, host_bytes=self.host_budget)
        for key in self._entries:
            copied.put(key, map_nested(Tensor, Tensor.clone, self.get(key)))
        return copied

    def _place(self, tensor: Tensor) -> _Stored:
        tensor, device = tensor.detach(), tensor.device
        size = tensor.numel() * tensor.element_size()
        if tensor.layout is torch.strided:  # a sparse tensor has no storage of its own
            size = min(size, tensor.untyped_storage().nbytes())
        if device.type != "cpu" and self.device_bytes + size <= self.device_budget:
            self.device_bytes += size
            return _Stored(_alone(tensor, size), device, size)
        if self.host_bytes + size <= self.host_budget:
            self.host_bytes += size
            return _Stored(_alone(_on_host(tensor), size), device, size)
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="sparsebit-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._count += 1
        path = self._folder / f"{self._count}.pt"
        torch.save(_alone(tensor.cpu(), size), path)
        written = path.stat().st_size
        self.disk_bytes += written
        return _Stored(path, device, written)

    def _release(self, stored: _Stored) -> None:
        if isinstance(stored.where, Path):
            self.disk_bytes -= stored.size
            stored.where.unlink(missing_ok=True)
        elif stored.where.device.type == "cpu":
            self.host_bytes -= stored.size
        else:
            self.device_bytes -= stored.size


def _alone(tensor: Tensor, size: int) -> Tensor:
    """A copy of a view, which would otherwise keep the whole larger tensor, in memory and in a file."""
    is_view = tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > size
    return tensor.clone() if is_view else tensor


def _on_host(tensor: Tensor) -> Tensor:
    """In pinned memory if it comes from a CUDA device, since copies from and to it are several times as fast.

    They are also asynchronous; all readers run later on the same device.
    """
    if tensor.device.type != "cuda" or tensor.layout is not torch.strided:
        return tensor.cpu()
    try:
        pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:  # the system has no more pinned memory
        return tensor.cpu()
    return pinned.copy_(tensor, non_blocking=True)


def _fetch(stored: _Stored) -> Tensor:
    if isinstance(stored.where, Path):
        loaded: Tensor = torch.load(stored.where, map_location=stored.device, weights_only=True)
        return loaded
    return stored.where.to(stored.device, non_blocking=True)
