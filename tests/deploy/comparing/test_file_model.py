"""A file is called like its model, whatever batch size it takes."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from sparsebit.deploy.comparing.file_model import FileModel
from sparsebit.deploy.exporting.to_onnx import OnnxOptions, to_onnx
from sparsebit.deploy.onnx_graph.model_file import write


class Both(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x * scale, x.sum(1)


@pytest.mark.parametrize("size", [1, 2, None])
@pytest.mark.parametrize("rows", [1, 5])
def test_any_number_of_samples(tmp_path: Path, size: int | None, rows: int) -> None:
    model = Both()
    example = torch.zeros(size or 2, 3), torch.ones(size or 2, 3)
    axes = None if size else {"x": {0: "batch"}, "scale": {0: "batch"}}
    options = OnnxOptions(dynamic_axes=axes, opset_version=17)
    made = to_onnx(model, example, {}, options, signature=inspect.signature(model.forward))
    write(made, tmp_path / "both.onnx")
    x, scale = torch.randn(rows, 3), torch.randn(rows, 3)
    file = FileModel(tmp_path / "both.onnx", signature=inspect.signature(model.forward))
    for found in (file(x, scale), file(scale=scale, x=x), FileModel(tmp_path / "both.onnx")(x=x, scale=scale)):
        for one, other in zip(found, model(x, scale), strict=True):
            torch.testing.assert_close(one, other)
