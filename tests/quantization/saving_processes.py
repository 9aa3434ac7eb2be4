"""Processes that save into one folder and are killed, or that read it meanwhile; a script, since pytest does not fork.

`python -m tests.quantization.saving_processes FOLDER`
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sparsebit import tensor_files
from sparsebit.quantization.saving import checkpoint

DESCRIPTION = {
    "config": {}, "example": None, "switches": {"weight": True, "activation": True}, "folded_layers": [], "sites": {},
    "graphs": {},
}  # fmt: skip


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    write(folder, 0)
    kill_at_random(folder)
    kill_at_every_step(folder)
    read_meanwhile(folder)


def kill_at_random(folder: Path) -> None:
    draw = random.Random(0)
    for _ in range(40):
        writer = started(lambda: write_on(folder))
        time.sleep(draw.uniform(0, 0.04))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        value(folder)
    left(folder)


def kill_at_every_step(folder: Path) -> None:
    """Before the first, second, ... thing that is done to a folder; old or new, and not one after the other."""
    seen = []
    for step in range(1, 100):
        write(folder, 0)
        writer = started(lambda step=step: dying(step, lambda: write(folder, 1)))
        _, status = os.waitpid(writer, 0)
        seen.append(value(folder))
        if status == 0:
            break
    assert seen == sorted(seen) and {0, 1} == set(seen), seen
    assert len(seen) > 5, seen
    left(folder)


def read_meanwhile(folder: Path) -> None:
    writers = [started(lambda: write_on(folder)) for _ in range(2)]
    end, seen = time.monotonic() + 2, set()
    try:
        while time.monotonic() < end:
            seen.add(value(folder))
    finally:
        for writer in writers:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
    assert len(seen) > 5, seen
    left(folder)


def write(folder: Path, number: int) -> None:
    checkpoint.write(folder, DESCRIPTION, {"weight": torch.full((100_000,), float(number))})


def write_on(folder: Path) -> None:
    number = 0
    while True:
        number += 1
        write(folder, number)


def value(folder: Path) -> float:
    """The one number that a whole saving holds."""
    (number,) = checkpoint.read(folder)[1]["weight"].unique().tolist()
    return number


def left(folder: Path) -> None:
    """The next save() has nothing of the killed ones about it."""
    others = [name for name in os.listdir(folder) if name == "notes.txt"]
    write(folder, -1)
    assert value(folder) == -1
    assert sorted(os.listdir(folder)) == sorted([*others, "model.safetensors", "sparsebit.json"]), os.listdir(folder)
    assert os.listdir(folder.parent) == [folder.name], os.listdir(folder.parent)


def started(act: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    return child


def dying(step: int, act: Callable[[], None]) -> None:
    """Run `act`; at the `step`th call of what changes folders, the process is killed."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for module, name in [
        (os, "mkdir"),
        (os, "rename"),
        (os, "replace"),
        (os, "unlink"),
        (os, "rmdir"),
        (os, "fsync"),
        (shutil, "copymode"),
        (shutil, "rmtree"),
        (tensor_files, "serialize_file"),
        (checkpoint, "exchange"),
    ]:
        setattr(module, name, counted(getattr(module, name)))
    act()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
