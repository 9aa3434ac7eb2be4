"""`ProgramTarget`: one runtime that takes a program of `torch.export`, as a row of `targets.TARGETS`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import fx
from torch.export import ExportedProgram

from sparsebit.deploy.sessions.program_facts import ProgramFacts
from sparsebit.errors import MissingExtraError


@dataclass(frozen=True)
class ProgramTarget:
    """How a runtime's file is written. Its session is in `sessions/`, its formats and ops are in its profile.

    `name`: that of the backend. `modules`: what writing imports; `extra` installs them. `write(program, facts, path)`
    lowers the program, whose inputs and outputs are flat, and stores the facts in the file, completed by its layers.
    `pairs_around_moves`, `lay_out`: as in `to_program`.
    `check`: raises if another tool is missing. `is_folder`: its "file" is a folder.
    `largest_size`: the limit of an open size, for runtimes that plan memory for it; None: none.
    """

    name: str
    ending: str
    write: Callable[[ExportedProgram, ProgramFacts, Path], None]
    modules: tuple[str, ...] = ()
    extra: str = ""
    is_folder: bool = False
    largest_size: int | None = None
    pairs_around_moves: bool = False
    lay_out: Callable[[fx.GraphModule], None] | None = None
    check: Callable[[], None] | None = None

    def require(self) -> None:
        """Raise, before any work, if a package or a tool is not installed."""
        for module in self.modules:
            if importlib.util.find_spec(module) is None:
                raise MissingExtraError(module.replace("_", "-"), self.extra, f"writing a {self.ending} file")
        if self.check is not None:
            self.check()
