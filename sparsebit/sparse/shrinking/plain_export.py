"""A plain float model as an ONNX file."""

from __future__ import annotations

import inspect
import os
from typing import Any

from torch import nn

from sparsebit.deploy.exporting.to_onnx import OnnxOptions, to_onnx
from sparsebit.deploy.onnx_graph.model_file import checked_path, staged, write
from sparsebit.execution.batches import as_call


def export_plain(model: nn.Module, example: Any, name: str | os.PathLike[str], options: OnnxOptions) -> None:
    """Write the file; `example`: a batch. An earlier file stays if this fails."""
    target = checked_path(name)
    args, kwargs = as_call(example, model)
    exported = to_onnx(model, args, kwargs, options, signature=inspect.signature(model.forward))
    with staged(target) as path:
        write(exported, path)
