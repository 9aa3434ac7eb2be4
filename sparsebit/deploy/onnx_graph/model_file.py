"""Writes an ONNX model to a file that appears whole or not at all; facts about files.

Models beyond 2 GB keep their weights in a second file with a random name, because protobuf messages are limited to
2 GB and because an older model must keep its own data until the new one is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsebit.checksums import sha256_of
from sparsebit.deploy.onnx_graph.packages import ir, onnx
from sparsebit.deploy.runtimes import owner_of
from sparsebit.errors import DeploymentError
from sparsebit.folders import flush, staging_folder, unwritable
from sparsebit.interrupts import ignored_interrupts
from sparsebit.records import FileFacts

# A protobuf message holds 2^31 bytes; the graph itself needs some of them.
LARGEST_SINGLE_FILE = (1 << 31) - (1 << 26)
OWN_PRODUCER = "sparsebit"


def checked_path(name: str | os.PathLike[str]) -> Path:
    """The path, if a file can be written there; before any work is done."""
    path = Path(name)
    if fault := unwritable(path, "model.onnx"):
        raise DeploymentError(fault)
    return path


def need_own(path: Path, hint: str) -> None:
    """Raise a DeploymentError, with the hint, if `path` is a file of another program; an empty one may be replaced."""
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        producer = onnx.load(os.fspath(path), load_external_data=False).producer_name or "an unknown program"
    except Exception:  # the readers' own exception classes differ by version
        raise DeploymentError(f"{path} exists and is not an ONNX file; {hint}") from None
    if producer != OWN_PRODUCER:
        raise DeploymentError(f"{path} exists and was written by {producer}, not by {OWN_PRODUCER}; {hint}")


def need_file(path: str | os.PathLike[str]) -> None:
    """Raise a DeploymentError unless `path` is a file."""
    if not os.path.isfile(path):
        folder = " is a folder; name the ONNX file. `sparsebit export` writes one from a saved model"
        raise DeploymentError(os.fspath(path) + (folder if os.path.isdir(path) else ": no such file"))


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A path in a hidden folder next to `target` to write to; at the end the files there replace the target.

    After an exception (or a kill) the target is as it was; the next run removes what a killed run left.
    """
    target = target.resolve()  # of a symbolic link, the file behind it is replaced
    with staging_folder(target) as folder:
        yield folder / target.name
        for path in folder.iterdir():
            flush(path)
        with ignored_interrupts():
            stale = data_files(target) if target.exists() else set()
            fresh = [path for path in folder.iterdir() if path.name != target.name]
            for path in fresh:  # data first: the model that names it appears last
                os.replace(path, target.parent / path.name)
            os.replace(folder / target.name, target)
            for path in stale - {target.parent / path.name for path in fresh}:
                path.unlink(missing_ok=True)
            flush(target.parent)


def write(model: ir.Model, path: Path, *, largest_single_file: int = LARGEST_SINGLE_FILE) -> None:
    """Serialize and check. The data of a model beyond `largest_single_file` bytes goes to a second file.

    Nodes and initializers that nothing reads are removed from the model: ONNX Runtime prints a warning for each
    unused initializer whenever it opens the file.
    """
    remove_unused(model)
    num_bytes = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    try:
        if num_bytes > largest_single_file:
            digest = uuid.uuid4().hex[:8]  # a new name: an older model keeps its own data
            ir.save(model, path, external_data=f"{path.stem}-{digest}.onnx.data")
        else:
            ir.save(model, path)
        onnx.checker.check_model(str(path), full_check=False)
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be written: {error}") from error
    except onnx.checker.ValidationError as error:
        raise DeploymentError(f"the exported graph is not valid ONNX: {error}") from error


def remove_unused(model: ir.Model) -> None:
    """Remove the nodes and initializers that nothing reads."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    RemoveUnusedNodesPass()(model)
    for graph in model.graphs():  # the pass leaves the initializers of subgraphs alone
        ports = {*graph.inputs, *graph.outputs}
        for name, value in list(graph.initializers.items()):
            if not value.uses() and value not in ports:
                del graph.initializers[name]


def data_files(path: Path) -> set[Path]:
    """The data files that an ONNX model names, in the same folder."""
    try:
        names = _external(path)
    except Exception:  # not a model: nothing of ours to clear away
        return set()
    folder = path.resolve().parent
    return {folder / name for name in names if Path(name).name == name and name.endswith(".onnx.data")}


def _external(path: Path) -> set[str]:
    """The names of the data files of a model's weights."""
    tensors: Any = onnx.load(os.fspath(path), load_external_data=False).graph.initializer
    return {item.value for tensor in tensors for item in tensor.external_data if item.key == "location"}


def all_files(path: Path) -> list[Path]:
    """The file and the files of its weights, wherever it says that they are; of a program, the file alone."""
    need_file(path)
    if path.suffix.lower() != ".onnx" and owner_of(path) is not None:
        return [path]
    try:
        return [path, *(path.parent / name for name in sorted(_external(path)))]
    except Exception as error:  # the readers' own exception classes differ by version
        raise DeploymentError(f"{path} is not an ONNX file: {error}") from error


def graph_digest(path: Path) -> str:
    """SHA-256 of the graph: nodes and weights, without weights in a second file, and without metadata."""
    graph = onnx.load(str(path), load_external_data=False).graph
    for tensor in graph.initializer:
        del tensor.external_data[:]  # it names the data file, whose name is random
    return hashlib.sha256(graph.SerializeToString(deterministic=True)).hexdigest()


def num_bytes(path: Path) -> int:
    """Bytes of the file and the files of its weights."""
    return sum(part.stat().st_size for part in all_files(path))


def file_facts(path: Path, *, float_bytes: int | None = None, advice: tuple[str, ...] | None = None) -> FileFacts:
    """The facts about a file that a record keeps."""
    return FileFacts(str(path), sha256_of(*all_files(path)), num_bytes(path), float_bytes, advice)
