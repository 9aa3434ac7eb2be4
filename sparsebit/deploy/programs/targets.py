"""`TARGETS`: every runtime whose file is made of a program of `torch.export`."""

from __future__ import annotations

from pathlib import Path

from sparsebit.deploy.programs.executorch import EXECUTORCH
from sparsebit.deploy.programs.program_target import ProgramTarget

TARGETS: dict[str, ProgramTarget] = {target.name: target for target in (EXECUTORCH,)}


def target_of(path: Path) -> ProgramTarget | None:
    """The target whose files end like this one."""
    return next((target for target in TARGETS.values() if path.suffix.lower() == target.ending), None)
