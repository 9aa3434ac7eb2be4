"""`SharedData`: values by key under a budget of bytes: kept where they are, else moved to the host, else to disk; dropped when told."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

MIB = 1 << 20


@dataclass
class _Entry:
    leaves: list[Any]  # tensors in memory, or paths of tensors on disk, or plain values
    devices: list[torch.device | None]
    structure: pytree.TreeSpec
    device_bytes: int = 0
    host_bytes: int = 0


class SharedData:
    """A dictionary of nested tensors that never holds more than its budgets in memory.

    A value that does not fit the device's budget goes to the host, one that does not fit the host's to a temporary folder.
    """

    def __init__(self, *, device_bytes: int = 1024 * MIB, host_bytes: int = 1024 * MIB) -> None:
        self.device_budget, self.host_budget = device_bytes, host_bytes
        self.device_bytes = self.host_bytes = self.disk_bytes = 0
        self._entries: dict[Hashable, _Entry] = {}
        self._folder: Path | None = None
        self._count = 0

    def put(self, key: Hashable, value: Any) -> None:
        self.drop(key)
        leaves, structure = pytree.tree_flatten(value)
        entry = _Entry([], [], structure)
        for leaf in leaves:
            entry.devices.append(leaf.device if isinstance(leaf, Tensor) else None)
            entry.leaves.append(self._place(leaf.detach(), entry) if isinstance(leaf, Tensor) else leaf)
        self._entries[key] = entry

    def get(self, key: Hashable) -> Any:
        entry = self._entries[key]
        leaves = [self._fetch(leaf, device) for leaf, device in zip(entry.leaves, entry.devices, strict=True)]
        return pytree.tree_unflatten(leaves, entry.structure)

    def drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.device_bytes -= entry.device_bytes
        self.host_bytes -= entry.host_bytes
        for leaf in entry.leaves:
            if isinstance(leaf, Path):
                self.disk_bytes -= leaf.stat().st_size
                leaf.unlink()

    def clear(self) -> None:
        for key in list(self._entries):
            self.drop(key)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def _place(self, tensor: Tensor, entry: _Entry) -> Tensor | Path:
        size = tensor.numel() * tensor.element_size()
        if tensor.device.type != "cpu":
            if self.device_bytes + size <= self.device_budget:
                self.device_bytes += size
                entry.device_bytes += size
                return tensor
            tensor = tensor.cpu()
        if self.host_bytes + size <= self.host_budget:
            self.host_bytes += size
            entry.host_bytes += size
            # A small view of a large tensor would keep the whole of it.
            return tensor.clone() if tensor.untyped_storage().nbytes() > 2 * size else tensor
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="sparsebit-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._count += 1
        path = self._folder / f"{self._count}.pt"
        # A view is written alone: torch.save would write the storage behind it.
        torch.save(tensor.clone() if tensor.untyped_storage().nbytes() > size else tensor, path)
        self.disk_bytes += path.stat().st_size
        return path

    def _fetch(self, leaf: Any, device: torch.device | None) -> Any:
        if isinstance(leaf, Path):
            return torch.load(leaf, map_location=device, weights_only=True)
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf
