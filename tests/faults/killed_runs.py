"""Runs that are killed at their steps and started again; a script, since pytest does not fork.

`python -m tests.faults.killed_runs VERB FOLDER [EVERY]`: SIGKILL before each step by which a file gets its name (or at
each `EVERY`th step of all), then the same call again: it ends with the bits of a run that was not killed.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from tests import torchvision_shim
from tests.faults.contents import changes, contents
from tests.faults.steps import Steps, kill
from tests.faults.verbs import VERBS, Verb

_NAMING = ("replace", "rename", "renameat2")


def main(name: str, folder: Path, every: int = 0) -> None:
    torchvision_shim.install()
    torch.set_num_threads(1)
    verb = VERBS[name]
    wanted, steps = _whole(verb, folder / "whole")
    numbers = [at for at, step in enumerate(steps, 1) if (at % every == 0 if every else step.split()[0] in _NAMING)]
    assert numbers, steps
    for at in numbers:
        place = folder / f"step{at}"
        place.mkdir()
        if verb.replaces:
            verb.run(place, 0)
        status = _forked(lambda at=at, place=place: _dying(verb, place, at))  # type: ignore[misc]
        assert os.WIFSIGNALED(status), f"step {at} was not reached"
        if not any((place / one).exists() for one in wanted if "/" not in one and one != verb.keeps) or verb.replaces:
            status = _forked(lambda place=place: verb.run(place, 1))  # type: ignore[misc]
            assert status == 0, f"killed at step {at} ({steps[at - 1]}): the next run fails"
        found = contents(place)
        found = {key: value for key, value in found.items() if key in wanted or key.split("/")[0] != verb.keeps}
        assert found == wanted, f"killed at step {at} ({steps[at - 1]}): {changes(wanted, found)}"
        shutil.rmtree(place)


def _whole(verb: Verb, folder: Path) -> tuple[dict[str, object], list[str]]:
    """The result of a run that is not killed, and its steps."""
    folder.mkdir(parents=True)
    if verb.replaces:
        verb.run(folder, 0)
    with Steps(folder, 0, kill).watched() as steps:
        verb.run(folder, 1)
    return contents(folder), steps.names


def _dying(verb: Verb, folder: Path, at: int) -> None:
    with Steps(folder, at, kill).watched():
        verb.run(folder, 1)


def _forked(act: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
