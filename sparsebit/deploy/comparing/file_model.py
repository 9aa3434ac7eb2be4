"""`FileModel`: an ONNX file as a module that is called like the model it came from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.deploy.comparing.check import runtime_of
from sparsebit.deploy.exporting.to_onnx import flat_inputs, in_order
from sparsebit.deploy.onnx_graph.packages import numpy
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.deploy.sessions.session import Session
from sparsebit.errors import DeploymentError

Feeds = dict[str, Any]


class FileModel(nn.Module):
    """Runs the file in the session that users open. A larger batch is split into pieces of the file's batch size.

    `signature`: the signature of the model's forward if keywords are named as its parameters; otherwise they are named
    as the file's inputs.
    """

    def __init__(self, file: Path, runtime: str | None = None, signature: inspect.Signature | None = None) -> None:
        super().__init__()
        self.file, self.signature = file, signature
        self.session = open_session(file, runtime or runtime_of(file))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs as tensors: the only one, or a tuple of them in the file's order."""
        if self.signature is not None:
            args, kwargs = tuple(flat_inputs(args, in_order(kwargs, self.signature))), {}
        feeds = as_feeds(kwargs or args, self.session, str(self.file))
        size, shapes = self.session.batch_size, self.session.input_shapes
        counts = {name: len(feeds[name]) for name, shape in shapes.items() if shape and shape[0] in (size, None)}
        count = max(counts.values(), default=0)
        if size is None and self.session.largest_batch is not None and count > self.session.largest_batch:
            size = self.session.largest_batch
        if size is None or count in (0, size):
            return _outputs(self.session.run(feeds))
        rows = {name for name, number in counts.items() if number == count}
        parts = []
        for start in range(0, count, size):
            places = [min(place, count - 1) for place in range(start, start + size)]  # the last sample pads the piece
            parts.append(self.session.run({k: v[places] if k in rows else v for k, v in feeds.items()}))
        return _outputs([_joined([part[place] for part in parts], size, count) for place in range(len(parts[0]))])


def as_feeds(batch: Any, session: Session, file: str) -> Feeds:
    """One batch: a mapping holds inputs by name; a tensor or a tuple of tensors is matched to the inputs in order.

    A tuple may be longer than the inputs, so that `(images, labels)` fits a file of images.
    """
    names = session.inputs
    if isinstance(batch, Mapping) and any(name in batch for name in names):
        if missing := [name for name in names if name not in batch]:
            raise DeploymentError(f"{file} takes {', '.join(names)}; the data has no {', '.join(missing)}")
        chosen = [batch[name] for name in names]
    else:
        chosen = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) or _is_array(leaf)]
        if len(chosen) < len(names) or (isinstance(batch, Mapping) and len(chosen) > len(names)):
            wanted = f"{len(names)} inputs ({', '.join(names)})"
            raise DeploymentError(f"{file} takes {wanted}; a batch of the data holds {len(chosen)} arrays")
    pairs = zip(names, chosen[: len(names)], strict=True)
    return {name: _typed(value, session.input_types[name], name, file) for name, value in pairs}


def _typed(value: Any, kind: str, name: str, file: str) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()  # numpy knows no bfloat16
    if value.dtype.kind == "f" and not kind.startswith(("float", "bfloat")):
        raise DeploymentError(f"{file}: input {name} is of type {kind}, the data of type {value.dtype}")
    return numpy.ascontiguousarray(value.astype(kind, copy=False))


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "shape")


def _joined(parts: list[Any], size: int, count: int) -> Any:
    """The outputs of single runs concatenated, without those of the padding samples."""
    return parts[0] if not parts[0].ndim or len(parts[0]) != size else numpy.concatenate(parts)[:count]


def _outputs(arrays: list[Any]) -> Any:
    tensors: list[Tensor] = [torch.from_numpy(array.copy()) for array in arrays]
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
