from __future__ import annotations

import dataclasses
import platform
import subprocess
import sys
from pathlib import Path

import sparsebit
from sparsebit.deploy.sessions.environment import environment
from sparsebit.records import RunRecord
from tests.records.examples import RECORD, run


def test_versions_and_machine() -> None:
    found = environment()
    assert found.sparsebit == sparsebit.__version__ and found.python == platform.python_version()
    assert found.cpu and found.num_cpus >= 1 and found.system == platform.platform()
    assert "no-such-package" not in found.packages and all(found.packages.values())


def test_it_goes_into_a_record() -> None:
    record = RECORD.replace(runs=(dataclasses.replace(run(), environment=environment()),))
    assert RunRecord.from_json(record.to_json()) == record


def test_torch_is_named_without_being_loaded(project_root: Path) -> None:
    code = (
        "import sys; from sparsebit.deploy.sessions.environment import environment; "
        "print(bool(environment().torch), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=project_root, capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
