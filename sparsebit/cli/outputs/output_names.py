"""Checks that the name of an output fits its kind: a folder, or a file with a certain ending."""

from __future__ import annotations

from pathlib import Path

import typer

# Endings of files; other dots in the name of a folder (`resnet-v1.5`) are fine.
_FILES = (
    *(".bin", ".ckpt", ".engine", ".gguf", ".h5", ".json", ".mlmodel", ".npz", ".onnx", ".pb", ".pkl", ".plan", ".pt"),
    *(".pt2", ".pth", ".safetensors", ".tar", ".tflite", ".trt", ".xml", ".yaml", ".yml", ".zip"),
)


def check_folder_name(path: Path, *, instead: str = "") -> None:
    """Raise for a name that ends like a file if a folder is written. `instead`: other possible outputs."""
    suffix = path.suffix.lower()
    if suffix in _FILES and not path.is_dir():
        raise typer.BadParameter(
            f"{path}: the result is a folder (with model.safetensors in it), and {suffix} is the ending of a file; "
            f"write {path.with_suffix('')}{instead}",
            param_hint="--output",
        )


def check_onnx_name(path: Path) -> None:
    """Raise for a name that does not end in .onnx if an ONNX file is written."""
    if path.suffix.lower() != ".onnx" and not path.is_dir():  # a folder gets a message of its own
        raise typer.BadParameter(
            f"{path}: the result is an ONNX file; write {path.with_suffix('.onnx')}", param_hint="--output"
        )
