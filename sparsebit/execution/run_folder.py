"""`RunFolder`: the finished parts of a long run, so that a killed run continues after the last one.

`run.json` describes the run; `00003.safetensors` holds the result of part 3. Each file appears whole or not at all,
and carries a checksum of its tensors and of the run's settings: a part is only used by a run with the same settings.
Block algorithms (`blocks/resume.py`) and the quantization of language models use it. `hold_run` reserves the folder
`TARGET.partial` for one process.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from sparsebit.errors import CheckpointError
from sparsebit.folders import alone_in, is_staging_folder, need_new, replace_file, replace_text
from sparsebit.tensor_files import digest, load_tensors, save_tensors

_RUN, _FORMAT = "run.json", 4


class RunFolder:
    """Finished parts in `path`. `settings`: everything that decides the result, by names that errors can mention."""

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._text = json.dumps({"format": _FORMAT, "settings": settings}, indent=1, sort_keys=True)
        self._key = hashlib.sha256(self._text.encode()).hexdigest()

    def open(self) -> RunFolder:
        """Begin the run, or continue the one in the folder; another run's folder, or other files, are an error."""
        file = self.path / _RUN
        if file.is_file():
            self._compare(file)
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.glob("*.safetensors"))):
            raise CheckpointError(
                f"{self.path} is not the folder of an interrupted run; remove it or give another folder"
            )
        else:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                replace_text(file, self._text)
            except OSError as error:
                raise CheckpointError(f"{file} cannot be written ({error})") from error
        return self

    def file(self, number: int) -> Path:
        """The file of part `number`, which exists once the part is finished."""
        return self.path / f"{number:05}.safetensors"

    def write(self, number: int, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
        """Keep a finished part."""
        write_part(self.file(number), tensors, {**facts, "run": self._key})

    def read(self, number: int, facts: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """The tensors and facts of a part; None if it is not finished. Facts that differ from `facts` are an error."""
        file = self.file(number)
        if not file.is_file():
            return None
        tensors, known = read_part(file)
        differing = [name for name, value in {**facts, "run": self._key}.items() if known.get(name) != value]
        if differing:
            raise CheckpointError(
                f"{file} is of something else: its {' and '.join(differing)} differ; start again with the same model "
                f"and settings, or remove {self.path} to begin anew"
            )
        return tensors, known

    def note(self, name: str) -> str | None:
        """The text that was stored under this name."""
        path = self.path / name
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def keep_note(self, name: str, text: str) -> None:
        """Store a text that the rest of the run depends on."""
        replace_text(self.path / name, text)

    def remove(self) -> None:
        """Remove the folder, after the result was written elsewhere."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _compare(self, file: Path) -> None:
        settings = json.loads(self._text)["settings"]
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            known, version = dict(found["settings"]), found["format"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} is damaged ({error!r}); delete {self.path} to begin anew") from None
        differing = sorted(name for name in {*known, *settings} if known.get(name) != settings.get(name))
        if version != _FORMAT or differing:
            why = f"its {', '.join(differing)} differ" if differing else f"its format is {version}"
            raise CheckpointError(
                f"{self.path} holds an interrupted run of something else: {why}; start again with the same model, data "
                "and settings to continue it, give another folder, or delete this one to begin anew"
            )


def write_part(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """One file of tensors with their checksum, which appears whole or not at all."""
    metadata = {**facts, "sha256": digest(tensors)}
    try:
        replace_file(path, lambda made: save_tensors(tensors, made, metadata))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written ({error}); what was finished before is kept") from error


def read_part(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and facts of a file of `write_part`."""
    tensors, facts = load_tensors(path)
    if facts.get("sha256") != digest(tensors):
        raise CheckpointError(f"{path} is damaged (its checksum differs); remove it to compute this part again")
    return tensors, facts


def has_begun(path: Path) -> bool:
    """Whether the folder is that of an interrupted run."""
    return (path / _RUN).is_file()


def hold_run(target: Path, held: ExitStack) -> Path:
    """The folder `TARGET.partial`, reserved for this process until `held` is closed.

    The run removes it when it ends, so a folder with other files is an error. If it is empty when `held` is
    closed, it is removed, and so are the parent folders that did not exist before.
    """
    path = target.with_name(f"{target.name}.partial")
    above = [folder for folder in path.parents if not folder.exists()]
    if not path.exists():
        path.mkdir(parents=True, exist_ok=True)
    is_folder = path.is_dir()
    if is_folder:
        try:
            held.enter_context(alone_in(path))
        except BlockingIOError:
            raise CheckpointError(f"another process works in {path} now; wait for it, or give another output") from None
    if not is_folder or not (has_begun(path) or all(is_staging_folder(one.name) for one in path.iterdir())):
        raise CheckpointError(f"{path} is not the folder of an interrupted run; remove it or give another output")
    held.callback(_remove_empty, path, *above)
    need_new(target)  # checked once the folder is reserved: another process may have just finished
    return path


def _remove_empty(*folders: Path) -> None:
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
