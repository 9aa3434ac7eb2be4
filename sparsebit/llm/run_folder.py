"""`RunFolder`: the finished blocks of a quantization, so that a killed run continues after the last one.

`run.json` tells what the run is of; `block-00003.safetensors` holds what was made of block 3. Each file appears whole
or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from sparsebit.errors import CheckpointError
from sparsebit.folders import alone_in, flush, need_new, replace_text, staging_folder
from sparsebit.llm.float_weight import FLOAT_KINDS, FloatWeight, Weight
from sparsebit.llm.input_scaling import ScaledInput
from sparsebit.llm.packed_weight import PackedWeight
from sparsebit.tensor_files import digest, load_tensors, save_tensors

_RUN, _FORMAT = "run.json", 2
_OTHER = "other:"


@dataclass(frozen=True)
class FinishedBlock:
    """What was made of a block: its packed layers by name, and `others`, its other tensors that have changed.

    `tokens`: how many calibration tokens each layer of an expert has read. `scales`: how inputs were scaled.
    """

    layers: Mapping[str, Weight]
    tokens: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[str, Tensor] = field(default_factory=dict)
    scales: Mapping[str, ScaledInput] = field(default_factory=dict)


class RunFolder:
    """Finished blocks in `path`. `settings`: all that decides the result besides the weights of the blocks.

    A folder of a run with other settings is an error; so is a block whose float weights have changed.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        text = json.dumps({"format": _FORMAT, "settings": settings}, indent=1, sort_keys=True)
        self._key = hashlib.sha256(text.encode()).hexdigest()
        known = path / _RUN
        if known.is_file():
            self._compare(known, json.loads(text)["settings"])
        elif path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError(f"{path} is not the folder of an interrupted run; remove it or give another output")
        else:
            path.mkdir(parents=True, exist_ok=True)
            replace_text(known, text)

    def read(self, number: int, source: str) -> FinishedBlock | None:
        """A finished block; None if it is not finished. `source`: of its float weights."""
        path = self._file(number)
        if not path.is_file():
            return None
        tensors, metadata = load_tensors(path)
        if metadata.get("run") != self._key or metadata.get("source") != source:
            raise CheckpointError(f"{path} is of other weights or of another run; remove {self.path} to begin anew")
        if metadata.get("sha256") != digest(tensors):
            raise CheckpointError(f"{path} is damaged (its checksum differs); remove it to quantize the block again")
        names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
        layers: dict[str, Weight] = {name: PackedWeight.from_tensors(tensors, name) for name in names}
        for kind in FLOAT_KINDS:
            floats = [name.removesuffix(f".{kind}") for name in tensors if name.endswith(f".{kind}")]
            layers |= {name: FloatWeight.from_tensors(tensors, name) for name in floats}
        others = {name.removeprefix(_OTHER): value for name, value in tensors.items() if name.startswith(_OTHER)}
        scales = {name: ScaledInput(**record) for name, record in json.loads(metadata["scales"]).items()}
        return FinishedBlock(layers, json.loads(metadata["tokens"]), others, scales)

    def write(self, number: int, source: str, block: FinishedBlock) -> None:
        """Keep a finished block."""
        tensors: dict[str, Tensor] = {f"{_OTHER}{name}": value for name, value in block.others.items()}
        for name, packed in block.layers.items():
            tensors |= packed.to_tensors(name)
        path = self._file(number)
        try:
            with staging_folder(path) as folder:
                metadata = {"run": self._key, "source": source, "sha256": digest(tensors)}
                metadata["tokens"] = json.dumps(dict(block.tokens))
                metadata["scales"] = json.dumps({name: asdict(scaled) for name, scaled in block.scales.items()})
                save_tensors(tensors, folder / path.name, metadata)
                flush(folder / path.name)
                os.replace(folder / path.name, path)
                flush(path.parent)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written ({error}); blocks before it are kept") from error

    def note(self, name: str) -> str | None:
        """The text that was kept under this name."""
        path = self.path / name
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def keep_note(self, name: str, text: str) -> None:
        """Keep a text that the rest of the run depends on."""
        replace_text(self.path / name, text)

    def remove(self) -> None:
        """The result is kept elsewhere."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _file(self, number: int) -> Path:
        return self.path / f"block-{number:05}.safetensors"

    def _compare(self, path: Path, settings: Mapping[str, Any]) -> None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            known, version = dict(found["settings"]), found["format"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error!r}); remove {self.path} to begin anew") from None
        differing = sorted(name for name in {*known, *settings} if known.get(name) != settings.get(name))
        if version != _FORMAT or differing:
            why = f"its {', '.join(differing)} differ" if differing else f"its format is {version}"
            raise CheckpointError(
                f"{self.path} holds an interrupted run of something else: {why}; start again with the same settings to "
                "continue it, or remove it to begin anew"
            )


def hold_run(target: Path, held: ExitStack) -> Path:
    """The folder `TARGET.partial`, which no other process works in until `held` is closed.

    If it is empty then, it is removed, and folders above that did not exist.
    """
    path = target.with_name(f"{target.name}.partial")
    above = [folder for folder in path.parents if not folder.exists()]
    if not path.exists():
        path.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        try:
            held.enter_context(alone_in(path))
        except BlockingIOError:
            raise CheckpointError(f"another process works in {path} now; wait for it, or give another output") from None
        held.callback(_remove_empty, path, *above)
    need_new(target)  # made by a run that ended a moment ago
    return path


def _remove_empty(*folders: Path) -> None:
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
