"""`Shards`: the weights of a model folder, as numbered safetensors files and their index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from sparsebit.folders import flush, write_text
from sparsebit.tensor_files import save_tensors


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
        text = json.dumps(index, indent=2) + "\n"
        write_text(self.folder / "model.safetensors.index.json", text)
