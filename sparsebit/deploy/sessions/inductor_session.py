"""A `.pt2` package of AOTInductor, in torch itself, on the CPU."""

from __future__ import annotations

import contextlib
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from sparsebit.deploy.sessions.program_facts import KEY, ProgramFacts, ProgramSession
from sparsebit.deploy.sessions.session import File
from sparsebit.errors import DeploymentError


class InductorSession(ProgramSession):
    """`num_threads`: of torch during a call; 0 leaves it as it is."""

    runtime = "aot_inductor"

    def __init__(self, file: File, num_threads: int = 0) -> None:
        name = "the package" if isinstance(file, bytes) else os.fspath(file)
        self.num_threads = num_threads
        try:
            with _as_path(file) as path:
                _require_whole(path, name)
                self.package = torch._inductor.aoti_load_package(str(path))
                stored = self.package.loader.get_metadata().get(KEY)
        except DeploymentError:
            raise
        except (RuntimeError, OSError, ValueError) as error:
            raise DeploymentError(f"{name} does not load in AOTInductor: {str(error).splitlines()[0]}") from error
        if stored is None:
            raise DeploymentError(
                f"{name} was not written by sparsebit: a package of AOTInductor does not name its inputs"
            )
        super().__init__(ProgramFacts.from_json(stored, name))

    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        inputs = [torch.from_numpy(array) for array in self.checked(feeds)]
        before = torch.get_num_threads()
        try:
            if self.num_threads:
                torch.set_num_threads(self.num_threads)
            found = self.package(*inputs)
        except RuntimeError as error:
            raise DeploymentError(f"the package does not run in AOTInductor: {str(error).splitlines()[0]}") from error
        finally:
            if self.num_threads:
                torch.set_num_threads(before)
        return [tensor.numpy() for tensor in found]


def _require_whole(path: Path, name: str) -> None:
    """Raise if a part differs from its checksum: torch does not compare them, and would run damaged machine code."""
    try:
        with zipfile.ZipFile(path) as package:
            broken = package.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DeploymentError(
            f"{name} does not load in AOTInductor: it is damaged, or not a .pt2 file: {error}"
        ) from None
    if broken is not None:
        raise DeploymentError(f"{name} does not load in AOTInductor: it is damaged in {broken}; write it again")


@contextlib.contextmanager
def _as_path(file: File) -> Iterator[Path]:
    if not isinstance(file, bytes):
        yield Path(file)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2"
        path.write_bytes(file)
        yield path
