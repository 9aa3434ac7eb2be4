"""With the shim in place torchvision and what stands on it can be imported and build models."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("package", ["torchvision", "timm", "transformers"])
def test_imports(package: str) -> None:
    pytest.importorskip(package)


def test_builds_a_model() -> None:
    models = pytest.importorskip("torchvision.models")
    model = models.mobilenet_v3_small(num_classes=3).eval()
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)


def test_a_declared_operator_is_not_a_working_one() -> None:
    torchvision = pytest.importorskip("torchvision")
    if torchvision.extension._has_ops():
        pytest.skip("this torchvision is whole")
    boxes, scores = torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.ones(1)
    with pytest.raises(NotImplementedError):
        torch.ops.torchvision.nms(boxes, scores, 0.5)
