"""`--data SOURCE`: batches from an image folder, a file of arrays, or the user's own factory.

`load_data` decides the kind by the name and returns `Data`, which can be iterated over any number of times. Samples are
taken evenly over the whole source (`spread`), because data is often sorted by class. An option that does not apply to
the kind of source is an error, never ignored. With `labelled`, each batch carries the class of every sample.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn

from sparsebit.cli.inputs.images import UnreadableImage, channels_first, image_files, normalized, read_image
from sparsebit.cli.inputs.loading import LoadingError, read_safetensors, resolve, users_code
from sparsebit.cli.option_groups import SOURCES, DataOptions
from sparsebit.errors import MissingExtraError
from sparsebit.execution.batches import input_rows
from sparsebit.progress import track

BATCH_SIZE = 32
_LARGEST_BATCH = 1 << 34  # bytes
_UNREADABLE_SHARE = 0.1


@dataclass(frozen=True)
class Data:
    """Batches that can be iterated over any number of times.

    `num_classes`: of a labelled image folder whose folders are in the order of the model's classes; else None.
    `num_batches`: None if it is not known before they are read.
    """

    description: str
    walk: Callable[[], Iterator[Any]]
    num_classes: int | None = None
    num_batches: int | None = None

    def __iter__(self) -> Iterator[Any]:
        return self.walk()

    def __length_hint__(self) -> int:
        return NotImplemented if self.num_batches is None else self.num_batches

    def tracked(self, what: str) -> Data:
        """The same data; reading it shows a progress bar."""
        return replace(self, walk=lambda: track(self.walk(), what, total=self.num_batches))


@dataclass(frozen=True)
class Inputs:
    """The inputs that data is read for. `owner`: their description (`parameters of Net.forward`); `takes_any`: other
    names are allowed too.

    `in_order`: if no array has a name in `names`, arrays are matched in order, provided their number is equal.
    `takes_bytes`: uint8 arrays are passed as they are, not as normalised images.
    """

    names: tuple[str, ...]
    owner: str
    takes_any: bool = False
    in_order: bool = False
    takes_bytes: bool = False
    dtype: torch.dtype = torch.float32

    @staticmethod
    def of(model: nn.Module) -> Inputs:
        """The parameters of the model's forward; float data is converted to the type of its weights."""
        parameters = inspect.signature(model.forward).parameters
        return Inputs(
            tuple(parameters),
            f"parameters of {type(model).__name__}.forward",
            takes_any=any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()),
            dtype=next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32),
        )


def load_data(source: str, options: DataOptions, inputs: Inputs, *, labelled: bool = False) -> Data:
    """Load the batches that `source` names, in the form that `inputs` requires.

    `labelled`: with the class of every sample, `(batch, labels)`, or in a mapping as `labels`.
    """
    path, kind = Path(source).expanduser(), _kind(source)
    if kind == "images":
        return _image_folder(path, options, labelled=labelled)
    if kind == "arrays" and path.is_file():
        return _arrays(path, options, inputs, labelled=labelled)
    if kind == "factory" and ":" in source and not path.exists():
        return _factory(source, options)
    absent = f"there is no such {'file' if kind == 'arrays' else 'folder or file'} (looked from {os.getcwd()})"
    fault = "unknown kind of file" if path.exists() else absent
    raise LoadingError(f"--data {source}: {fault}; give {SOURCES}")


def fitting(options: DataOptions, source: str, other: str | None) -> DataOptions:
    """The options for `source`: if `other` is data of another kind, those that only that kind supports are dropped."""
    kind = _kind(source)
    if other is None or kind == _kind(other):
        return options
    if kind == "images":
        return replace(options, arrays=None)
    if kind == "arrays":
        return replace(options, size=None, resize=None, gray=False)
    return DataOptions(num_samples=options.num_samples)


def _kind(source: str) -> str:
    path = Path(source).expanduser()
    return "images" if path.is_dir() else "arrays" if path.suffix in (".npz", ".safetensors") else "factory"


def _image_folder(folder: Path, options: DataOptions, *, labelled: bool) -> Data:
    size = options.size
    if size is None:
        raise typer.BadParameter(
            f"{folder} is an image folder: give --size, and --mean and --std if the model needs them"
        )
    options.refuse(("arrays",), f"{folder}: it is an image folder")
    found = image_files(folder)
    files = [found[index] for index in spread(len(found), options.num_samples)]
    classes, num_classes = folder_classes(folder, files) if labelled else ({}, None)
    batch_size = min(options.batch_size or BATCH_SIZE, len(files))
    num_bytes = batch_size * (1 if options.gray else 3) * size.height * size.width * 4
    if num_bytes > _LARGEST_BATCH:
        taken = f"a batch of {batch_size} such images takes {num_bytes / 1e9:.0f} GB"
        raise LoadingError(f"--size {size}: {taken}; give a smaller --size or --batch-size")

    def walk() -> Iterator[Any]:
        images: list[tuple[Path, Tensor]] = []
        for image in _readable(files, lambda file: read_image(file, size, resize=options.resize, gray=options.gray)):
            images.append(image)
            if len(images) == batch_size:
                yield batch_of(images)
                images.clear()
        if images:
            yield batch_of(images)

    def batch_of(images: list[tuple[Path, Tensor]]) -> Any:
        batch = normalized(torch.stack([pixels for _, pixels in images]), options.mean, options.std)
        return (batch, torch.tensor([classes[file] for file, _ in images])) if labelled else batch

    num_batches = -(-len(files) // batch_size)
    return Data(f"{len(files)} of {len(found)} images in {folder}, {size}", walk, num_classes, num_batches)


def _arrays(file: Path, options: DataOptions, inputs: Inputs, *, labelled: bool) -> Data:
    options.refuse(("size", "resize", "gray"), f"{file.name}: arrays are taken as they are")
    stored = _read_npz(file) if file.suffix == ".npz" else read_safetensors(file, "--data")
    arrays = _chosen(stored, options.arrays, inputs, file)
    if not arrays or not any(array.numel() for array in arrays.values()):
        raise LoadingError(f"--data {file}: holds no samples")
    lengths = {len(array) if array.dim() else 0 for array in arrays.values()}
    if len(lengths) != 1 or lengths == {0}:
        shown = ", ".join(f"{name} {tuple(array.shape)}" for name, array in arrays.items())
        raise LoadingError(
            f"--data {file}: arrays must have the same number of samples in their first dimension, but it holds {shown}"
            + ("" if options.arrays else "; --input NAME chooses among them")
        )
    arguments = _as_arguments(list(arrays), inputs, file)
    labels = array_labels(stored, list(arrays), file) if labelled else None
    has_images = not inputs.takes_bytes and any(array.dtype == torch.uint8 for array in arrays.values())
    if not has_images:
        options.refuse(("mean", "std"), f"{file.name}: only images as bytes (uint8) are normalised")
    (total,) = lengths
    chosen = torch.tensor(spread(total, options.num_samples))
    parts = chosen.split(options.batch_size or BATCH_SIZE)

    def prepared(name: str, part: Tensor) -> Tensor:
        values = arrays[name][part]
        if has_images and values.dtype == torch.uint8 and values.dim() in (3, 4):
            values = normalized(channels_first(values, f"--data {file}, {name}"), options.mean, options.std)
        return values.to(inputs.dtype) if values.is_floating_point() else values

    def walk() -> Iterator[Any]:
        for part in parts:
            batch = {argument: prepared(name, part) for name, argument in arguments.items()}
            if labels is None:
                yield batch.get("", batch)
            else:
                yield (batch[""], labels[part]) if "" in batch else {**batch, "labels": labels[part]}

    left_out = [name for name in stored if name not in arrays and not (labelled and is_labels(name, stored[name]))]
    rest = f" (left out: {', '.join(left_out)})" if left_out else ""
    return Data(f"{len(chosen)} of {total} samples in {file}{rest}", walk, num_batches=len(parts))


def _factory(source: str, options: DataOptions) -> Data:
    names = ("size", "resize", "mean", "std", "gray", "batch_size", "arrays")
    options.refuse(names, f"{source}: its batches are taken as they are")
    thing = resolve(source, "--data")
    if not callable(thing) and (not isinstance(thing, Iterable) or isinstance(thing, Iterator)):
        kind = type(thing).__name__
        raise LoadingError(f"--data {source} is a {kind}; name a function that returns batches, or a DataLoader")

    def walk() -> Iterator[Any]:
        seen = 0
        with users_code(f"--data {source} failed after 0 samples"):
            batches = iter(thing() if callable(thing) else thing)
        while seen < options.num_samples:
            with users_code(f"--data {source} failed after {seen} samples"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch
            seen += min(input_rows(batch), default=1)  # the fewest rows of its tensors: better too many than too few

    return Data(f"up to {options.num_samples} samples of {source}", walk)


def spread(total: int, wanted: int) -> list[int]:
    """At most `wanted` of `total` positions, evenly spaced, so that sorted data (classes) is sampled everywhere.

    >>> spread(10, 4)
    [0, 2, 5, 7]
    """
    count = min(total, wanted)
    return [index * total // count for index in range(count)]


def _chosen(
    arrays: Mapping[str, Tensor], wanted: Sequence[str] | None, inputs: Inputs, file: Path
) -> Mapping[str, Tensor]:
    """The arrays that are `wanted`; default: all but labels that are not named after an input."""
    if wanted is not None:
        if missing := [name for name in wanted if name not in arrays]:
            raise LoadingError(f"--input {', '.join(missing)}: {file} holds {', '.join(arrays) or 'nothing'}")
        return {name: arrays[name] for name in wanted}
    if inputs.takes_any:
        return arrays
    others = {name: array for name, array in arrays.items() if name in inputs.names or not is_labels(name, array)}
    return others or arrays


def _as_arguments(names: list[str], inputs: Inputs, file: Path) -> dict[str, str]:
    """Array -> its input: the one of the same name, or "" for a single array, which needs no name."""
    others = [name for name in names if name not in inputs.names]
    if not others or (inputs.takes_any and len(names) > 1):
        return dict(zip(names, names, strict=True))
    if others == names and len(names) == 1:
        return {names[0]: ""}
    if others == names and inputs.in_order and len(names) == len(inputs.names):
        return dict(zip(names, inputs.names, strict=True))
    raise LoadingError(
        f"--data {file}: {', '.join(others)} is not one of the {inputs.owner} ({', '.join(inputs.names)}); rename such "
        "arrays, leave them out, or choose with --input NAME"
    )


def _read_npz(file: Path) -> Mapping[str, Tensor]:
    try:
        import numpy
    except Exception:  # a broken package raises anything
        raise MissingExtraError("numpy", "data", "reading a .npz file") from None
    try:
        with numpy.load(file, allow_pickle=False) as archive:
            arrays = {name: numpy.ascontiguousarray(archive[name]) for name in archive.files}
            # torch only accepts this machine's byte order.
            native = {name: array.astype(array.dtype.newbyteorder("="), copy=False) for name, array in arrays.items()}
            return {name: torch.from_numpy(array) for name, array in native.items()}
    except (OSError, ValueError, EOFError, TypeError) as error:  # also zipfile.BadZipFile's base
        raise LoadingError(f"--data {file}: cannot be read as arrays ({error})") from None


def _readable(files: list[Path], read: Callable[[Path], Tensor]) -> Iterator[tuple[Path, Tensor]]:
    """The readable images; the others are reported, and are an error if they are more than a tenth."""
    faults: list[str] = []
    for file in files:
        image = _read_or_none(file, read, faults)
        if image is not None:
            yield file, image
        elif len(faults) > _UNREADABLE_SHARE * len(files):
            shown = f"{len(faults)} of {len(files)} images cannot be read, more than {_UNREADABLE_SHARE:.0%}"
            raise LoadingError(f"--data: {shown}: {'; '.join(faults[:3])}")
    if faults:
        shown = f"{len(faults)} of {len(files)} images cannot be read and are left out"
        warnings.warn(f"{shown}: {'; '.join(faults[:3])}", stacklevel=2)


def _read_or_none(file: Path, read: Callable[[Path], Tensor], faults: list[str]) -> Tensor | None:
    try:
        return read(file)
    except UnreadableImage as fault:
        faults.append(str(fault))
        return None


# --- labels: from the folders of the images, or from an array in the file of the inputs


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
                f"{folder}: {file.name} is not in the folder of a class, so its label is not known; put labelled images"
                " in one folder for each class, give a .npz file with labels, or --metric agreement, which needs none"
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
