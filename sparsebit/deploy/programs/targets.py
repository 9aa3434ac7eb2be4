"""`TARGETS`: every runtime whose file is made of a program of `torch.export`."""

from __future__ import annotations

from sparsebit.deploy.programs.aot_inductor import AOT_INDUCTOR
from sparsebit.deploy.programs.coreml import COREML
from sparsebit.deploy.programs.executorch import EXECUTORCH
from sparsebit.deploy.programs.litert import LITERT
from sparsebit.deploy.programs.program_target import ProgramTarget

TARGETS: dict[str, ProgramTarget] = {target.name: target for target in (EXECUTORCH, AOT_INDUCTOR, LITERT, COREML)}
