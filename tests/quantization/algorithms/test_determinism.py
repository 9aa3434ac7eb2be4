from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "algorithm_process.py"
ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_two_processes_give_equal_bits() -> None:
    """With other hashes of strings, so that nothing depends on the order of a set."""
    pytest.importorskip("scipy")
    first, second = (_bits(seed) for seed in ("1", "2"))
    assert first.keys() == second.keys() and len(first) > 10
    assert [name for name in first if first[name] != second[name]] == []
    algorithms = [name for name in first if name not in ("sensitivity", "search")]
    assert len({first[name] for name in algorithms}) == len(algorithms)  # each one did something


def _bits(hash_seed: str) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths}
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))
