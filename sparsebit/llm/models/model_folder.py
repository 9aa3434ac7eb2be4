"""`ModelFolder`: a model in transformers' format, its tensors read one at a time from memory-mapped safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsebit.errors import CheckpointError
from sparsebit.llm.models.file_checksums import check_files

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLE = (
    "is a pickle, which could run any code: where you trust it, load it with transformers and write it with "
    "model.save_pretrained(NEW_DIR), which makes safetensors"
)


class ModelFolder:
    """`config`: the model's config.json. `files`: the file of each tensor, by the tensor's name."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a folder; give the folder of a downloaded model")
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
        try:
            found: Tensor = self._opened(name).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.files[name]} cannot be read ({error})") from None
        return found

    def part(self, name: str) -> Any:
        """A tensor whose rows can be read a few at a time: `part[3:5]`, `part.get_shape()`."""
        try:
            return self._opened(name).get_slice(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.files[name]} cannot be read ({error}); download it again") from None

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
        if (self.path / _INDEX).is_file():
            entries = _read_json(self.path / _INDEX).get("weight_map")
            if not isinstance(entries, dict) or not entries:
                raise CheckpointError(f"{self.path / _INDEX} cannot be read: it has no weight_map with tensors")
            files = {str(name): self.path / str(file) for name, file in entries.items()}
            for file in dict.fromkeys(files.values()):
                if not file.is_file() or file.parent != self.path:
                    raise CheckpointError(f"{self.path / _INDEX} names {file.name}, which is not in the folder")
            if (self.path / _SINGLE).is_file() and self.path / _SINGLE not in files.values():
                raise CheckpointError(
                    f"{self.path} holds two models: {_SINGLE}, and the files that {_INDEX} names; some tools read the "
                    "one, some the other: remove one of them"
                )
            return files
        file = self.path / _SINGLE
        if not file.is_file():
            pickles = sorted(path.name for path in self.path.glob("*.bin"))
            advice = f" ({pickles[0]} {_PICKLE})" if pickles else ""
            raise CheckpointError(f"{self.path} has neither {_INDEX} nor {_SINGLE}: safetensors are needed{advice}")
        try:
            with safe_open(file, "pt") as opened:
                return dict.fromkeys(opened.keys(), file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read ({error})") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); give the folder of a downloaded model") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return found
