"""A plain float model as an ONNX file."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from sparsebit.deploy.exporting.to_onnx import to_onnx
from sparsebit.deploy.onnx_graph.io_names import DynamicAxes
from sparsebit.deploy.onnx_graph.model_file import checked_path, staged, write
from sparsebit.execution.batches import as_call


@dataclass(frozen=True)
class ExportOptions:
    """Arguments of `torch.onnx.export`, under the same names."""

    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    dynamic_axes: DynamicAxes | None = None
    opset_version: int = 21
    verbose: bool = False


def export_plain(model: nn.Module, example: Any, name: str | os.PathLike[str], options: ExportOptions) -> None:
    """Write the file; `example`: a batch. An earlier file stays if this fails."""
    target = checked_path(name)
    args, kwargs = as_call(example, model)
    exported = to_onnx(
        model,
        args,
        kwargs,
        signature=inspect.signature(model.forward),
        input_names=options.input_names,
        output_names=options.output_names,
        dynamic_axes=options.dynamic_axes,
        opset_version=options.opset_version,
        verbose=options.verbose,
    )
    with staged(target) as path:
        write(exported, path)
