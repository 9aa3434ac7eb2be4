"""A full disk, a broken disk and too little memory at every step of the verbs that write results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparsebit.errors import SparsebitError
from tests.faults.contents import changes, contents
from tests.faults.steps import Steps, fail
from tests.faults.verbs import VERBS, Verb

SLOW = [name for name in VERBS if name.startswith("llm")]
MARKED = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in VERBS]


@pytest.mark.sample(4)
@pytest.mark.parametrize("error", ["ENOSPC", "memory"])
@pytest.mark.parametrize("name", MARKED)
def test_a_fault_at_every_step(name: str, error: str, tmp_path: Path) -> None:
    sweep(VERBS[name], tmp_path, error)


@pytest.mark.parametrize("name", SLOW)
def test_a_fault_at_some_steps(name: str, tmp_path: Path) -> None:
    """Of the slow verbs, the last steps: those at which the result gets its name."""
    verb = VERBS[name]
    clean = tmp_path / "clean"
    clean.mkdir()
    with Steps(clean, 0, fail("ENOSPC")).watched() as counted:
        verb.run(clean, 1)
    sweep(verb, tmp_path, "ENOSPC", range(max(1, len(counted.names) - 2), len(counted.names) + 2))


@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("visit blocks", 0),
        pytest.param("llm quantize", 0, marks=pytest.mark.slow),
        pytest.param("visit blocks", 1, marks=pytest.mark.slow),
        pytest.param("llm quantize", 1, marks=pytest.mark.slow),
        pytest.param("export with data", 1, marks=pytest.mark.slow),
        pytest.param("save a pruned model", 1, marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_every_checkpoint(name: str, every: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.killed_runs", name, str(tmp_path), str(every)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]


def sweep(verb: Verb, tmp_path: Path, error: str, numbers: range = range(1, 1000)) -> None:
    """The verb fails at each step in turn; what was there is intact or replaced, and the same call then succeeds."""
    wanted = result(verb, tmp_path / "wanted", *([0, 1] if verb.replaces else [1]))
    for at in numbers:
        folder = tmp_path / f"step{at}"
        folder.mkdir()
        before = {}
        if verb.replaces:
            verb.run(folder, 0)
            before = contents(folder)
        with Steps(folder, at, fail(error)).watched() as steps:
            fault = failure(verb, folder)
        where = f"step {at}: {steps.names[at - 1] if steps.is_reached else 'none'}"
        if not steps.is_reached:
            assert fault is None, where
            assert at > 3, steps.names
            return
        found = contents(folder, verb.keeps)
        without_kept = {key: value for key, value in wanted.items() if key.split("/")[0] != verb.keeps}
        old = {key: value for key, value in before.items() if key.split("/")[0] != verb.keeps}
        assert found in (old, without_kept), f"{where}: {changes(old, found)}"
        if fault is None:
            assert found == without_kept, f"{where}: the fault is lost, and the result is not there"
            continue
        assert isinstance(fault, (SparsebitError, OSError, MemoryError)), f"{where}: {fault!r}"
        if not verb.replaces and found == without_kept and found:
            continue  # an output that exists is refused
        verb.run(folder, 1)
        assert contents(folder, "") == wanted, f"{where}: the next run: {changes(wanted, contents(folder))}"


def result(verb: Verb, folder: Path, *numbers: int) -> dict[str, object]:
    folder.mkdir()
    for number in numbers:
        verb.run(folder, number)
    return contents(folder)


def failure(verb: Verb, folder: Path) -> BaseException | None:
    try:
        verb.run(folder, 1)
    except Exception as error:
        return error
    return None
