from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.quantization.tiny import calibrated, qconfig

pytest.importorskip("onnxruntime")
ALL = {"x": {0: "batch", 2: "height", 3: "width"}}


class Branching(nn.Module):
    """Pools large pictures. `is_counting` keeps state, so that the module runs its own code instead of a graph."""

    def __init__(self, is_counting: bool = False) -> None:
        super().__init__()
        self.conv, self.is_counting, self.calls = nn.Conv2d(3, 4, 3, padding=1), is_counting, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.is_counting:
            self.calls += 1
        assert x.shape[-2] < 1000, "too high: crop it"
        y: Tensor = self.conv(x)
        if y.shape[-1] < 0:  # of no size
            return y
        if y.shape[-1] > 8:
            y = F.max_pool2d(y, 2)
        return y.mean((2, 3))


@pytest.mark.parametrize("is_counting", [False, True], ids=["graph", "own code"])
def test_a_branch_on_a_dynamic_size_is_told(is_counting: bool, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    qmodel = calibrated(Branching(is_counting).eval(), [x], qconfig(backend="onnxruntime"), example_inputs=x)
    with pytest.warns(UserWarning, match=re.escape("if y.shape[-1] > 8:")) as told:
        qmodel.export_onnx(x, tmp_path / "m.onnx", dynamic_axes=ALL)
    assert [one.filename for one in told] == [
        __file__
    ]  # nothing about the assert, nor what torch asks for a convolution


@pytest.mark.parametrize("axes", [None, {"x": {0: "batch", 2: "height"}}], ids=["fixed", "another axis"])
def test_a_branch_on_a_fixed_size_is_not(axes: dict[str, dict[int, str]] | None, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    qmodel = calibrated(Branching().eval(), [x], qconfig(backend="onnxruntime"), example_inputs=x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        qmodel.export_onnx(x, tmp_path / "m.onnx", dynamic_axes=copy.deepcopy(axes), check=[x])
    assert "answer" not in torch.SymBool.__bool__.__qualname__
