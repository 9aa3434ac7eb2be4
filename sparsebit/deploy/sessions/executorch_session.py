"""A `.pte` file in ExecuTorch's own runtime, on the CPU."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from sparsebit.deploy.sessions.program_facts import KEY, Port, ProgramFacts, ProgramSession
from sparsebit.deploy.sessions.sealed_file import require_whole
from sparsebit.deploy.sessions.session import File
from sparsebit.errors import DeploymentError, MissingExtraError

_LOCK = threading.Lock()


class ExecuTorchSession(ProgramSession):
    """`num_threads`: of the process, since ExecuTorch has one pool for all its programs; 0 leaves it as it is."""

    runtime = "executorch"

    def __init__(self, file: File, num_threads: int = 0) -> None:
        name = "the program" if isinstance(file, bytes) else os.fspath(file)
        # From memory: a program that is open from a path reads the file again whenever a method is loaded.
        data = file if isinstance(file, bytes) else Path(file).read_bytes()
        require_whole(data, name)
        with _native_messages_kept() as messages:
            runtime, bindings = runtime_modules()
            try:
                self.program = runtime.Runtime.get().load_program(data)
                if num_threads:
                    bindings._unsafe_reset_threadpool(num_threads)
                self.method = self.program.load_method("forward")
                stored = self.program.load_method(KEY).execute([])[0] if KEY in self.program.method_names else None
            except (RuntimeError, ValueError) as error:
                lines = [*str(error).splitlines()[:1], *messages()]
                raise DeploymentError(f"{name} does not load in ExecuTorch: {'; '.join(lines)}") from error
        if self.method is None:
            raise DeploymentError(f"{name} does not load in ExecuTorch: it has no method `forward`")
        super().__init__(_facts_of(self.method.metadata) if stored is None else ProgramFacts.from_json(stored, name))
        # Memory is planned for the largest sizes.
        meta = self.method.metadata
        self.limits = {name: meta.input_tensor_meta(place).sizes() for place, name in enumerate(self.inputs)}
        firsts = [self.limits[name][0] for name, shape in self.input_shapes.items() if shape and shape[0] is None]
        self.largest_batch = min(firsts, default=None)

    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        arrays = self.checked(feeds)
        for name, array in zip(self.inputs, arrays, strict=True):
            if any(size > limit for size, limit in zip(array.shape, self.limits[name], strict=True)):
                raise DeploymentError(
                    f"{name} is {array.shape}, and the program has memory for {tuple(self.limits[name])} at most: "
                    "ExecuTorch plans the memory of open sizes when the file is written; give smaller batches"
                )
        inputs = [torch.from_numpy(array) for array in arrays]
        try:
            return [_array(value) for value in self.method.execute(inputs)]
        except RuntimeError as error:
            shapes = ", ".join(f"{name} {tuple(feeds[name].shape)}" for name in self.inputs)
            raise DeploymentError(f"the program does not run in ExecuTorch ({shapes}): {error}") from error


def runtime_modules() -> tuple[Any, Any]:
    """ExecuTorch's runtime and its bindings, with the kernels for quantized operators outside of delegates."""
    try:
        from executorch import runtime
        from executorch.extension.pybindings import portable_lib
        from executorch.kernels import quantized  # noqa: F401 (registers its kernels)
    except Exception:  # a broken package raises anything
        raise MissingExtraError("executorch", "executorch", "running a .pte file") from None
    return runtime, portable_lib


def _array(value: Any) -> Any:
    return value.numpy() if isinstance(value, torch.Tensor) else torch.tensor(value).numpy()


def _facts_of(meta: Any) -> ProgramFacts:
    """Of a program that another tool wrote; its sizes are the largest ones if they are dynamic."""
    inputs = tuple(_port(f"input{place}", meta.input_tensor_meta(place)) for place in range(meta.num_inputs()))
    outputs = tuple(_port(f"output{place}", meta.output_tensor_meta(place)) for place in range(meta.num_outputs()))
    return ProgramFacts("", inputs, outputs)


def _port(name: str, tensor: Any) -> Port:
    names = {0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32", 7: "float64"}
    return Port(name, names.get(tensor.dtype(), "bool"), tuple(tensor.sizes()))


@contextlib.contextmanager
def _native_messages_kept() -> Iterator[Any]:
    """Inside, what ExecuTorch's C++ code writes to the process's stderr is kept: it logs as it looks at the CPU."""
    import tempfile

    with _LOCK, tempfile.TemporaryFile() as kept:
        try:
            before = os.dup(2)
        except OSError:  # a process without stderr
            yield list
            return

        def lines() -> list[str]:
            kept.seek(0)
            text = kept.read().decode(errors="replace")
            return [line for line in text.splitlines() if line.strip() and "cpuinfo" not in line][:2]

        os.dup2(kept.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(before, 2)
            os.close(before)
