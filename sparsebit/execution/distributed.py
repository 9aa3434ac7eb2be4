"""Communication between the processes of a distributed run; in a single process every function does the plain thing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsebit.errors import SparsebitError

# How long ranks wait for a file that rank 0 writes.
_PATIENCE = timedelta(minutes=30)
_num_calls: Counter[str] = Counter()


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gather(value: Any) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank; a list of one in a single process."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def rank() -> int:
    """This process's number; 0 in a single process."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def is_main_process() -> bool:
    return rank() == 0


def barrier() -> None:
    if is_distributed():
        dist.barrier()


def once(name: str, act: Callable[[], object]) -> None:
    """Run `act` on rank 0 while the others wait; a single process just runs it. Its error is an error on all ranks.

    Rank 0 itself does not wait, so code that calls this on rank 0 only works, too. The other ranks wait for a key of
    torch's store that consists of `name` and the number of calls with it.
    """
    if not is_distributed():
        act()
        return
    _num_calls[name] += 1
    key = f"sparsebit/{_num_calls[name]}/{name}"
    store = dist.distributed_c10d._get_default_store()
    if is_main_process():
        try:
            act()
        except BaseException as error:
            store.set(key, f"{type(error).__name__}: {error}")
            raise
        store.set(key, "done")
        return
    store.wait([key], _PATIENCE)
    answer = store.get(key).decode()
    if answer != "done":
        raise SparsebitError(f"{name}: rank 0 failed, {answer}")


def is_sharded(module: nn.Module) -> bool:
    """Whether parameters are spread over the ranks (DTensors)."""
    return any(_is_spread(parameter) for parameter in module.parameters())


@torch.no_grad()
def gather_shards(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state with every spread tensor gathered, on the CPU of rank 0; other ranks get it without them.

    All ranks must call this if a tensor is spread. Names of one tensor stay names of one tensor.
    """
    whole: dict[int, Tensor] = {}
    for tensor in state.values():
        if _is_spread(tensor) and id(tensor) not in whole:
            full = tensor.detach().full_tensor()  # type: ignore[attr-defined]
            whole[id(tensor)] = full.cpu() if is_main_process() else full.new_empty(0)
    return {name: whole.get(id(tensor), tensor) for name, tensor in state.items()}


def _is_spread(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor, without its import


def to_cpu(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in state.items()}
