from __future__ import annotations

from pathlib import Path

import torch

from sparsebit.execution.distributed import (
    barrier,
    gather,
    gather_shards,
    is_distributed,
    is_main_process,
    is_sharded,
    once,
    to_cpu,
)
from tests.two_ranks import assert_two_ranks_agree

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from sparsebit.execution.distributed import barrier, gather, gather_shards, is_distributed, is_main_process, once
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
rank = dist.get_rank()
assert is_distributed() and is_main_process() == (rank == 0)
values = gather({"rank": rank, "x": torch.full((2 + rank,), float(rank))})
assert [value["rank"] for value in values] == [0, 1], values
assert [tuple(value["x"].tolist()) for value in values] == [(0.0, 0.0), (1.0, 1.0, 1.0)], values
assert gather(None) == [None, None]

acted = []
once("act", lambda: acted.append(rank))
if rank == 0:
    once("act alone", lambda: acted.append(rank))  # waits for nobody
assert acted == ([0, 0] if rank == 0 else []), acted
try:
    once("fail", lambda: 1 / 0)
except (ZeroDivisionError, ValueError) as error:
    assert rank == 0 or str(error) == "fail: rank 0 failed, ZeroDivisionError: division by zero", error
else:
    raise AssertionError("no error")

spread = distribute_tensor(torch.arange(3.0), init_device_mesh("cpu", (2,)), [Shard(0)])
whole = gather_shards({"a": spread, "tied": spread, "plain": torch.ones(1)})
assert whole["a"] is whole["tied"] and whole["plain"].tolist() == [1.0]
assert whole["a"].tolist() == ([0.0, 1.0, 2.0] if rank == 0 else []), whole
barrier()
dist.destroy_process_group()
assert not is_distributed() and gather(rank) == [rank]
print("rank", rank, "agrees")
"""


def test_alone() -> None:
    assert not is_distributed() and is_main_process()
    assert gather("value") == ["value"]
    barrier()
    acted: list[int] = []
    once("act", lambda: acted.append(1))
    assert acted == [1]
    state = {"a": torch.ones(2)}
    assert gather_shards(state)["a"] is state["a"] and not is_sharded(torch.nn.Linear(1, 1))


def test_to_cpu() -> None:
    state = to_cpu({"a": torch.ones(2)})
    assert state["a"].device.type == "cpu"


def test_two_processes(tmp_path: Path) -> None:
    assert_two_ranks_agree(tmp_path, SCRIPT)
