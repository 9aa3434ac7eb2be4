"""The files of a folder as values that can be compared; what differs from run to run by design is left out."""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors.torch import load_file


def contents(folder: Path, without: str = "") -> dict[str, object]:
    """Every file in the folder with what it holds; keys that are random are left out."""
    found: dict[str, object] = {}
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(root) / name
            key = str(path.relative_to(folder))
            if without and key.split("/")[0] == without:
                continue
            found[_named(key)] = None if path.is_dir() else _value(path)
    return found


def _named(key: str) -> str:
    return "model.onnx.data" if key.endswith(".onnx.data") else key


def _value(path: Path) -> object:
    if path.suffix == ".safetensors":
        try:
            return {name: (str(x.dtype), x.tolist()) for name, x in load_file(path).items()}
        except Exception:
            return path.read_bytes()
    if path.name == "sparsebit.json":
        description = json.loads(path.read_text())
        return {key: value for key, value in description.items() if key not in ("key", "files", "checksum")}
    if path.suffix == ".onnx":
        import onnx

        model = onnx.load(path)
        return {tensor.name: tensor.raw_data for tensor in model.graph.initializer}
    return path.read_bytes()


def changes(right: dict[str, object], found: dict[str, object]) -> str:
    names = [name for name in sorted({*right, *found}) if right.get(name, 0) != found.get(name, 0)]
    kinds = {name: "new" if name not in right else "gone" if name not in found else "changed" for name in names}
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
