from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

from sparsebit.execution.distributed import barrier, gather, is_distributed, is_main_process, to_cpu

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from sparsebit.execution.distributed import barrier, gather, is_distributed, is_main_process

dist.init_process_group("gloo")
rank = dist.get_rank()
assert is_distributed() and is_main_process() == (rank == 0)
values = gather({"rank": rank, "x": torch.full((2 + rank,), float(rank))})
assert [value["rank"] for value in values] == [0, 1], values
assert [tuple(value["x"].tolist()) for value in values] == [(0.0, 0.0), (1.0, 1.0, 1.0)], values
assert gather(None) == [None, None]
barrier()
dist.destroy_process_group()
assert not is_distributed() and gather(rank) == [rank]
print("rank", rank, "agrees")
"""


def test_alone() -> None:
    assert not is_distributed() and is_main_process()
    assert gather("value") == ["value"]
    barrier()


def test_to_cpu() -> None:
    state = to_cpu({"a": torch.ones(2)})
    assert state["a"].device.type == "cpu"


def test_two_processes(tmp_path: Path, project_root: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    paths = [str(project_root), os.environ.get("PYTHONPATH", "")]
    shared["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, str(script)]
    ranks = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}, **pipes) for rank in range(2)]  # type: ignore[call-overload]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    for rank, output in enumerate(outputs):
        assert f"rank {rank} agrees" in output, output
