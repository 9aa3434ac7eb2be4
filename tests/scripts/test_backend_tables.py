"""The tables of the backends guide are in step with the runtime profiles."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import ROOT


def test_in_step() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "backend_tables.py"), "--check"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
