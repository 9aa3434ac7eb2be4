"""Three small networks for CIFAR-10, and a short training: for machines without trained weights.

The training takes some minutes on two cores (ResNet-20: four epochs of 20,000 images) and is kept in the data folder.
It is far from the best that these networks reach; the examples show what quantization costs, not records.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
NUM_IMAGES, EPOCHS, BATCH = 20_000, 4, 128


def conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(inputs, outputs, 3, stride), nn.ReLU(), conv(outputs, outputs, 3))
        self.skip = nn.Identity() if inputs == outputs else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet20() -> nn.Module:
    widths = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
    blocks = [Residual(*width) for width in widths]
    return nn.Sequential(conv(3, 16, 3), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Inverted(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        parts = [conv(inputs, wide, 1), nn.ReLU6(), conv(wide, wide, 3, stride, groups=wide), nn.ReLU6()]
        self.body = nn.Sequential(*parts, conv(wide, outputs, 1))
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.is_residual else self.body(x)


def mobilenetv2() -> nn.Module:
    widths = [(24, 24, 1), (24, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 96, 1)]
    blocks = [Inverted(*width) for width in widths]
    head = (conv(96, 256, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    return nn.Sequential(conv(3, 24, 3), nn.ReLU6(), *blocks, *head)


class VisionTransformer(nn.Module):
    """Patches of 4 x 4, four blocks of width 128."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(torch.zeros(1, 64, width))
        block = {"activation": "gelu", "batch_first": True, "norm_first": True, "dropout": 0.0}
        layers = [nn.TransformerEncoderLayer(width, 4, 2 * width, **block) for _ in range(depth)]  # type: ignore[arg-type]
        self.blocks = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(tokens)).mean(1))


NETWORKS = {"resnet20": resnet20, "mobilenetv2": mobilenetv2, "vit": VisionTransformer}


def trained(name: str, images: Path, folder: Path) -> nn.Module:
    """The network with the weights in `folder`; where there are none, it is trained first and they are kept."""
    torch.manual_seed(0)
    model, file = NETWORKS[name](), folder / f"{name}.safetensors"
    if not file.is_file():
        print(f"no weights of {name}: training {EPOCHS} epochs of {NUM_IMAGES} images, some minutes", file=sys.stderr)
        _train(model, images, 0.003 if name == "vit" else 0.2)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, f"{file}.part")
        Path(f"{file}.part").replace(file)
    model.load_state_dict(load_file(file))
    return model.eval()


def _train(model: nn.Module, file: Path, rate: float) -> None:
    archive = np.load(file)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    images = (torch.from_numpy(archive["images"][:NUM_IMAGES]).permute(0, 3, 1, 2).float() / 255 - mean) / std
    labels = torch.from_numpy(archive["labels"][:NUM_IMAGES].astype(np.int64))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).train()
    kind = torch.optim.AdamW if rate < 0.01 else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=rate, weight_decay=5e-4)
    steps = EPOCHS * -(-len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.3)
    for epoch in range(EPOCHS):
        for chosen in torch.randperm(len(images)).split(BATCH):
            batch = images[chosen]
            if torch.rand(()) < 0.5:
                batch = batch.flip(3)
            down, right = torch.randint(-3, 4, (2,)).tolist()
            batch = batch.roll((down, right), (2, 3))
            loss = F.cross_entropy(model(batch.to(device)), labels[chosen].to(device), label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1} of {EPOCHS}: loss {loss.item():.2f}", file=sys.stderr)
    model.cpu()
