"""The device of a run and its processes under torchrun: joined when a command needs them, left when it ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sparsebit.errors import ConfigError, SparsebitError

T = TypeVar("T")


def as_device(device: torch.device | str) -> torch.device:
    """The device; one that does not exist here is a ConfigError.

    >>> as_device("cpu")
    device(type='cpu')
    """
    try:
        found, problem = torch.device(device), ""
    except RuntimeError:
        found, problem = torch.device("cpu"), "allowed: cpu, cuda or cuda:N"
    count = torch.cuda.device_count() if found.type == "cuda" and torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= count:
        problem = f"torch sees {count} GPUs here; use cpu, or a lower number"
    if problem:
        raise ConfigError(f"device={str(device)!r}: {problem}")
    return found


@dataclass(frozen=True)
class Rank:
    """One of `count` processes; `number` 0 writes files. `device`: that of this process."""

    number: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def from_first(self, make: Callable[[], T]) -> T:
        """The result of `make` on rank 0, on every rank; its error is an error on every rank."""
        if self.count == 1:
            return make()
        box: list[Any] = [None, None]
        cause: Exception | None = None
        if self.is_first:
            try:
                box[0] = make()
            except Exception as error:
                box[1], cause = f"rank 0 failed, {type(error).__name__}: {error}", error
        dist.broadcast_object_list(box, 0, device=self.device)
        if box[1] is not None:
            raise SparsebitError(box[1]) if cause is None else cause
        found: T = box[0]
        return found


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, other packages see no process group: compressed-tensors would wait for processes that load nothing."""
    if not dist.is_available():
        yield
        return
    known = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        yield
    finally:
        dist.is_initialized = known


@contextlib.contextmanager
def joined(device: torch.device | str) -> Iterator[Rank]:
    """Join the other processes of torchrun (gloo on a CPU, NCCL on GPUs); alone, one process of one. `cuda` is then the
    GPU of the local rank. An existing process group is used and not changed.
    """
    wanted = as_device(device)
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes > 1 and wanted.type == "cuda" and wanted.index is None:
        wanted = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    made = num_processes > 1 and not dist.is_initialized()
    if made:
        if not dist.is_available():
            raise ConfigError("torchrun with several processes: this torch has no torch.distributed")
        if wanted.type == "cuda":
            torch.cuda.set_device(wanted)
        dist.init_process_group("nccl" if wanted.type == "cuda" else "gloo")
    is_grouped = dist.is_available() and dist.is_initialized()
    try:
        yield Rank(dist.get_rank(), dist.get_world_size(), wanted) if is_grouped else Rank(0, 1, wanted)
    finally:
        if made:
            dist.destroy_process_group()
