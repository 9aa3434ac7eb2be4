"""A program as a `.pte` file of ExecuTorch, delegated to XNNPACK wherever that has the operator."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from sparsebit.deploy.exporting.export_errors import quiet, refused_as
from sparsebit.deploy.programs.program_target import ProgramTarget
from sparsebit.deploy.programs.xnnpack_layers import delegation, refusals
from sparsebit.deploy.programs.xnnpack_patterns import lay_out_for_xnnpack
from sparsebit.deploy.sessions.executorch_session import runtime_modules
from sparsebit.deploy.sessions.program_facts import KEY, ProgramFacts
from sparsebit.deploy.sessions.sealed_file import seal


def write_pte(program: ExportedProgram, facts: ProgramFacts, path: Path) -> None:
    """Lower the program and write it; its facts are a constant method of the file."""
    with _quietly():
        runtime_modules()  # first, because it registers what quantize ops outside of delegates become
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import EdgeProgramManager, to_edge_transform_and_lower

        with refused_as("executorch does not take the program"):
            with refusals() as refused:
                lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
            edge = lowered.exported_program()
            stored = replace(facts, **delegation(edge, refused)).to_json()
            made = EdgeProgramManager(edge, {KEY: stored}, lowered.compile_config).to_executorch()
    with path.open("wb") as file:
        made.write_to_file(file)
    seal(path)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Inside, torchao and ExecuTorch log nothing below errors, and leave the root logger without a handler."""
    root: Any = logging.getLogger()
    handlers, before = list(root.handlers), logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        root.handlers[:] = handlers


EXECUTORCH = ProgramTarget(
    "executorch",
    ".pte",
    write_pte,
    modules=("executorch", "torchao", "flatbuffers", "ruamel.yaml", "tabulate"),
    extra="executorch",
    largest_size=64,
    pairs_around_moves=True,
    lay_out=lay_out_for_xnnpack,
)
