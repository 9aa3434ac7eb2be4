"""Two processes of one process group, as `torchrun` starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def torchrun(script: str, folder: Path, cwd: Path | None = None) -> None:
    """Two processes of `script`, which gets the folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=cwd or folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]


def assert_two_ranks_agree(folder: Path, text: str, *arguments: str) -> None:
    """Run the script `text` as ranks 0 and 1; each has to print "rank N agrees". `folder`: for its file."""
    script = folder / "ranks.py"
    script.write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    shared["PYTHONPATH"] = os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH")) if path)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        output = process.communicate(timeout=240)[0]
        assert f"rank {rank} agrees" in output, output
