"""Accuracy on real weights and images, small enough for every run; `benchmarks/accuracy.py` measures the whole."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsebit
from tests.parameters import first_fast

pytestmark = pytest.mark.data

NUM_IMAGES = 250
OBSERVERS = ("minmax", "moving_average", "percentile", "mse", "kl_histogram", "aciq")


class ResNet20:
    """The float model, 64 calibration images, and 250 test images with what the model says about them."""

    def __init__(self, folder: Path) -> None:
        numpy = pytest.importorskip("numpy")
        spec = importlib.util.spec_from_file_location("cifar_models", folder / "cifar10/models/cifar_models.py")
        assert spec is not None and spec.loader is not None
        models = sys.modules["cifar_models"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(models)
        mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (models.RESNET20_MEAN, models.RESNET20_STD))

        def images(file: str, count: int) -> torch.Tensor:
            pixels = torch.from_numpy(numpy.load(folder / "cifar10" / file)["images"][:count])
            return (pixels.permute(0, 3, 1, 2).float() / 255 - mean) / std

        self.model = models.load("resnet20")
        self.calibration = list(images("train_10k.npz", 64).split(32))
        self.images = images("test_5k.npz", NUM_IMAGES)
        self.outputs = self.run(self.model)

    def run(self, model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([model(batch) for batch in self.images.split(250)])

    @functools.cache  # noqa: B019 (one instance, for this file)
    def quantized(self, backend: str, observer: str, weight_bits: int = 8) -> torch.Tensor:
        scheme = "per-tensor-symmetric" if backend == "tensorrt" else "per-tensor-affine"
        config: dict[str, Any] = {
            "BACKEND": backend,
            "DEVICE": "cpu",
            "SCHEDULE": {"FUSE_BN": True},
            "W": {"QUANTIZER": {"BIT": weight_bits}, "OBSERVER": {"TYPE": observer}},
            "A": {"QSCHEME": scheme, "QUANTIZER": {"BIT": 8}, "OBSERVER": {"TYPE": observer}},
        }
        return self.run(sparsebit.quantize(self.model, self.calibration, config))

    def agreement(self, outputs: torch.Tensor) -> float:
        return float((outputs.argmax(1) == self.outputs.argmax(1)).float().mean())

    def sqnr_db(self, outputs: torch.Tensor) -> float:
        error = (outputs - self.outputs).pow(2).sum()
        return float(10 * torch.log10(self.outputs.pow(2).sum() / error))


@pytest.fixture(scope="module")
def resnet20(shared_data: Path) -> ResNet20:
    return ResNet20(shared_data)


@pytest.mark.parametrize("backend", ["virtual", pytest.param("tensorrt", marks=pytest.mark.slow)])
@pytest.mark.parametrize("observer", first_fast(OBSERVERS, 3))
def test_no_observer_breaks_resnet20_at_eight_bits(resnet20: ResNet20, observer: str, backend: str) -> None:
    assert resnet20.agreement(resnet20.quantized(backend, observer)) >= 0.97


def test_the_best_observer_reaches_thirty_decibels(resnet20: ResNet20) -> None:
    outputs = resnet20.quantized("virtual", "mse")
    assert resnet20.sqnr_db(outputs) >= 30
    assert resnet20.agreement(outputs) >= 0.985


@pytest.mark.slow
def test_four_bit_weights_with_the_mse_observer_beat_min_max(resnet20: ResNet20) -> None:
    by_mse, by_extremes = (resnet20.quantized("virtual", observer, weight_bits=4) for observer in ("mse", "minmax"))
    assert resnet20.sqnr_db(by_mse) >= resnet20.sqnr_db(by_extremes) + 1
    assert resnet20.agreement(by_mse) >= 0.93
