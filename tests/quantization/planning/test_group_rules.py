from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import BackendError
from sparsebit.quantization import QuantModel
from tests.quantization.tiny import qconfig


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class Branching(Net):
    """Its own code runs, with quantized layers inside."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


def groups(backend: str, bits: int = 4, size: int = 4, **changes: Any) -> Any:
    values = {"W.QSCHEME": "per-group-symmetric", "W.QUANTIZER.GROUP_SIZE": size, "A.QUANTIZER.DISABLE": True}
    return qconfig({**values, "W.QUANTIZER.BIT": bits, **changes}, backend=backend)


@pytest.mark.parametrize("model", [Net(), Branching()], ids=["traced", "untraced"])
@pytest.mark.parametrize("backend", ["openvino", "tensorrt"])
def test_ragged_groups(backend: str, model: nn.Module) -> None:
    words = (
        rf"W\.QUANTIZER\.GROUP_SIZE=4 at second: 6 inputs do not make whole groups, and {backend} reads whole "
        r"groups only; set one that divides 6 \(3, 2\), a per-channel QSCHEME \(.*\), or BACKEND: virtual"
    )
    with pytest.raises(BackendError, match=words):
        QuantModel(model, groups(backend))


def test_groups_of_8_bits_for_tensorrt() -> None:
    words = r"W\.QUANTIZER\.BIT=8 at first: tensorrt reads groups of 4-bit weights only; set 4, a per-channel QSCHEME"
    with pytest.raises(BackendError, match=words):
        QuantModel(Net(), groups("tensorrt", bits=8, size=2))


@pytest.mark.parametrize(
    ("backend", "bits", "size"),
    [
        ("openvino", 4, 2),
        ("openvino", 8, 2),
        ("tensorrt", 4, 2),
        ("tensorrt", 8, 64),  # a group as long as a row is a scale per channel
        ("onnxruntime", 8, 4),
        ("virtual", 8, 4),
    ],
)
def test_what_the_backend_reads(backend: str, bits: int, size: int) -> None:
    QuantModel(Net(), groups(backend, bits, size))


def test_one_layer_may_have_its_own_format() -> None:
    specific = {"W.SPECIFIC": [{"second": ["QSCHEME", "per-channel-symmetric"]}]}
    QuantModel(Net(), groups("openvino", **specific))
    QuantModel(Net(), groups("openvino", **{"W.SPECIFIC": [{"second": ["QUANTIZER.DISABLE", True]}]}))
