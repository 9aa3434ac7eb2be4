"""The class of every sample: from the folders of the images, or from an array in the same file as the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sparsebit.cli.inputs.loading import LoadingError

NAMES = frozenset({"class", "classes", "label", "labels", "target", "targets", "y", "y_test", "y_train"})


def is_labels(name: str, array: Tensor) -> bool:
    """Whether an array of a file is named like labels and can hold labels."""
    return name.lower() in NAMES and array.dim() <= 2


def folder_classes(folder: Path, files: Sequence[Path]) -> tuple[dict[Path, int], int | None]:
    """The class of each file by the folder of `folder` that it lies in, and the number of classes.

    If all folders have numbers as names, these are the classes, and the number of classes is unknown (None). Otherwise
    classes count in the order of the names, as torchvision's ImageFolder does.
    """
    names = {}
    for file in files:
        inner = file.relative_to(folder).parts[:-1]
        if not inner:
            raise LoadingError(
                f"{folder}: {file.name} is not in the folder of a class, so its label is not known; labelled images "
                "are in one folder for each class (or give a .npz file with an array of labels, or --metric agreement, "
                "which needs none)"
            )
        names[file] = inner[0]
    known = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if all(name.isdecimal() for name in known):
        return {file: int(name) for file, name in names.items()}, None
    return {file: known.index(name) for file, name in names.items()}, len(known)


def array_labels(arrays: Mapping[str, Tensor], inputs: Sequence[str], file: Path) -> Tensor:
    """The only array that is named like labels and is not an input: (samples,), whole numbers."""
    found = {name: array for name, array in arrays.items() if name not in inputs and is_labels(name, array)}
    if len(found) != 1:
        shown = f"several ({', '.join(found)})" if found else f"none (it holds {', '.join(arrays)})"
        raise LoadingError(
            f"{file}: exactly one array of labels (`labels` or `y`) is required, and it has {shown}; rename them, or "
            "give --metric agreement, which needs no labels"
        )
    ((name, labels),) = found.items()
    labels = labels.squeeze(1) if labels.dim() == 2 and labels.shape[1] == 1 else labels
    lengths = {len(arrays[given]) for given in inputs}
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.dim() != 1 or lengths != {len(labels)}:
        raise LoadingError(
            f"{file}: {name} {tuple(labels.shape)} {str(labels.dtype).removeprefix('torch.')} is not the number of the "
            f"class of each of {'/'.join(map(str, sorted(lengths)))} samples; give whole numbers, one for each sample"
        )
    return labels.long()
