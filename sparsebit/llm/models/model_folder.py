"""Model folders in transformers' format: `ModelFolder` reads one, a tensor at a time; `Shards` writes the weights."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsebit.errors import CheckpointError
from sparsebit.folders import flush, write_text
from sparsebit.llm.models.file_checksums import check_files
from sparsebit.llm.models.hub_classes import need_folder
from sparsebit.tensor_files import save_tensors

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLE = (
    "is a pickle, which could run any code: where you trust it, load it with transformers and write it with "
    "model.save_pretrained(NEW_DIR), which makes safetensors"
)


class ModelFolder:
    """`config`: the model's config.json. `files`: the memory-mapped file of each tensor, by the tensor's name."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        need_folder(self.path)
        self.config: dict[str, Any] = _read_json(self.path / "config.json")
        self.files = self._find_files()
        self._open: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU: only its own bytes are read."""
        if name not in self.files:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; is it a whole checkpoint of this architecture?")
        with _readable(self.files[name]):
            found: Tensor = self._opened(name).get_tensor(name)
        return found

    def part(self, name: str) -> Any:
        """A tensor whose rows can be read a few at a time: `part[3:5]`, `part.get_shape()`."""
        with _readable(self.files[name]):
            return self._opened(name).get_slice(name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors; only the files' headers are read."""
        return {name: tuple(self.part(name).get_shape()) for name in self.files}

    def check_files(self) -> None:
        """Compare the files with the checksums in the folder; a folder without checksums passes."""
        check_files(self.path)

    def close(self) -> None:
        """Forget the mapped files, so that their pages can be freed."""
        self._open.clear()

    def _opened(self, name: str) -> Any:
        """The file that holds the tensor, mapped."""
        path = self.files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, "pt")
        return self._open[path]

    def _find_files(self) -> dict[str, Path]:
        index, single = self.path / _INDEX, self.path / _SINGLE
        if not index.is_file() and single.is_file():
            with _readable(single), safe_open(single, "pt") as opened:
                return dict.fromkeys(opened.keys(), single)
        pickles = sorted(path.name for path in self.path.glob("*.bin"))
        problem, files = None, dict[str, Path]()
        if index.is_file():
            entries = _read_json(index).get("weight_map")
            names = {str(name): str(file) for name, file in entries.items()} if isinstance(entries, dict) else {}
            files = {name: self.path / file for name, file in names.items()}
            missing = [file for file in {*files.values()} if not file.is_file() or file.parent != self.path]
            if not files:
                problem = f"{index} cannot be read: it has no weight_map with tensors"
            elif missing:
                problem = f"{index} names {missing[0].name}, which is not in the folder"
            elif single.is_file() and single not in files.values():
                problem = f"{self.path} holds two models: {_SINGLE}, and the files that {_INDEX} names; remove one"
        else:
            advice = f" ({pickles[0]} {_PICKLE})" if pickles else ""
            problem = f"{self.path} has neither {_INDEX} nor {_SINGLE}: safetensors are needed{advice}"
        if problem is not None:
            raise CheckpointError(problem)
        return files


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); give the folder of a downloaded model") from None


def _read_json(path: Path) -> dict[str, Any]:
    with _readable(path):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return found


def add_tensors(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Write one more file with these tensors into a folder that `Shards` has finished."""
    save_tensors(dict(tensors), folder / name, {"format": "pt"})
    flush(folder / name)
    index = _read_json(folder / _INDEX)
    index["weight_map"] |= dict.fromkeys(tensors, name)
    index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    write_text(folder / _INDEX, json.dumps(index, indent=2) + "\n")


class Shards:
    """`count` files in `folder`; after the last one, `finish` writes the index."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.weight_map: dict[str, str] = {}
        self.num_bytes = self.num_written = 0

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        self.num_written += 1
        name = f"model-{self.num_written:05}-of-{self.count:05}.safetensors"
        save_tensors(dict(tensors), self.folder / name, {"format": "pt"})
        flush(self.folder / name)
        self.weight_map |= dict.fromkeys(tensors, name)
        self.num_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def finish(self) -> None:
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(self.weight_map.items()))}
        write_text(self.folder / _INDEX, json.dumps(index, indent=2) + "\n")
