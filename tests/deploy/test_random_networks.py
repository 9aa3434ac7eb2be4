"""Random small networks: what ONNX Runtime computes from the exported file is what was simulated, or export refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.deploy.audit.audit_file import audit
from sparsebit.quantization import QuantModel
from tests.parameters import first_fast
from tests.quantization.tiny import calibrated, qconfig

CHANNELS = 8


class Step(nn.Module):
    """One random step on `(n, 8, h, w)`; `other` is an earlier value of the network."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.kind, make = draw.choice(list(STEPS.items()))
        self.inner = make(draw)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        if self.kind == "add":
            return x + F.interpolate(other, x.shape[-2:])
        if self.kind == "cat":
            y: Tensor = self.inner(torch.cat([x, F.interpolate(other, x.shape[-2:])], 1))
            return y
        if self.kind == "twice":
            return torch.relu(self.inner(torch.relu(self.inner(x))))
        if self.kind == "pad":
            return torch.relu(self.inner(F.pad(x, (1, 2, 0, 1))))
        last: Tensor = self.inner(x)
        return last


class Resize(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode=self.mode)


def conv(draw: random.Random, inside: int = CHANNELS) -> nn.Module:
    kernel, dilation = draw.choice([1, 3, (1, 3), (3, 2)]), draw.choice([1, 1, 2])
    groups = draw.choice([1, 1, 2, CHANNELS]) if inside == CHANNELS else 1
    padding = draw.choice([(2, 2), (2, 3)])
    settings = {"dilation": dilation, "groups": groups, "bias": draw.random() < 0.7}
    layer = nn.Conv2d(inside, CHANNELS, kernel, padding=padding, **settings)  # type: ignore[arg-type]
    act = draw.choice([nn.ReLU, nn.ReLU6, nn.SiLU, nn.Identity, nn.Hardswish, lambda: nn.LeakyReLU(0.1)])
    norm = [nn.BatchNorm2d(CHANNELS)] if draw.random() < 0.5 else []
    return nn.Sequential(layer, *norm, act())


def pool(draw: random.Random) -> nn.Module:
    count = draw.random() < 0.5
    return draw.choice(
        [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1, count_include_pad=count), nn.AvgPool2d(2)]
    )


def up(draw: random.Random) -> nn.Module:
    kernel, padding, more = draw.choice([(2, 0, 0), (4, 1, 0), (3, 1, 1)])
    groups = draw.choice([1, 2])
    return nn.ConvTranspose2d(CHANNELS, CHANNELS, kernel, 2, padding, more, groups, bias=draw.random() < 0.5)


STEPS: dict[str, Callable[[random.Random], nn.Module]] = {
    "conv": conv,
    "conv again": conv,
    "pool": pool,
    "up": up,
    "add": lambda _: nn.Identity(),
    "cat": lambda draw: conv(draw, 2 * CHANNELS),
    "twice": lambda _: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    "pad": lambda _: nn.Conv2d(CHANNELS, CHANNELS, 3),
    "resize": lambda draw: Resize(draw.choice(["nearest", "bilinear"])),
}


class Net(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.steps = nn.ModuleList(Step(draw) for _ in range(draw.randint(2, 5)))
        self.head = draw.choice([nn.Conv2d(CHANNELS, 4, 1), nn.Linear(CHANNELS, 4)])

    def forward(self, x: Tensor) -> Tensor:
        values = [torch.relu(self.stem(x))]
        for index, step in enumerate(self.steps):
            values.append(step(values[-1], values[index // 2]))
        last = values[-1]
        y: Tensor = self.head(last.mean((2, 3)) if isinstance(self.head, nn.Linear) else last)
        return y


def quantized(seed: int, backend: str) -> tuple[QuantModel, Tensor]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Net(draw).eval()
    images = torch.randn(3, 3, 12, 12)
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    off = [{name: ["QUANTIZER.DISABLE", True]} for name in layers if draw.random() < 0.2]
    changes: dict[str, object] = {"W.SPECIFIC": off, "A.SPECIFIC": off} if off else {}
    if backend == "virtual":
        changes |= {"W.QUANTIZER.BIT": draw.choice([4, 8]), "A.QUANTIZER.BIT": draw.choice([6, 8])}
    return calibrated(model, [images], qconfig(changes, backend=backend)), images


@pytest.mark.parametrize("backend", first_fast(["onnxruntime", "virtual"]))
@pytest.mark.parametrize("seed", first_fast(range(8)))
def test_the_file_computes_what_was_simulated(seed: int, backend: str, tmp_path: Path) -> None:
    qmodel, images = quantized(seed, backend)
    axes = {"x": {0: "batch"}} if seed % 2 else None
    file = tmp_path / "m.onnx"
    batches = [images, images[:1]] if axes else [images]
    parity = qmodel.export_onnx(images, file, dynamic_axes=axes, check=batches)
    assert parity is not None and parity.worst.sqnr_db > 45
    if backend == "onnxruntime":
        found = audit(file, repeats=0)
        assert not any(layer.rounds_weight for layer in found.layers)
