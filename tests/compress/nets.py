"""A classifier of blurred patterns, trained in a second: every test of a search begins with it."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_CLASSES = 6


class Patterns(nn.Module):
    """Two convolutions, one of them depthwise, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.deep, self.conv2 = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 24, 3, stride=2)
        self.head = nn.Linear(24, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        x = F.relu(self.conv2(F.relu(self.deep(x))))
        return self.head(x.mean((2, 3)))


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of a class's pattern under noise, and their labels."""
    patterns = torch.randn(NUM_CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(99))
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (count,), generator=made)
    return patterns[labels] + 1.2 * torch.randn(count, 3, 8, 8, generator=made), labels


def batches(count: int, seed: int, size: int = 32, *, labelled: bool = False) -> list[object]:
    images, labels = samples(count, seed)
    pairs = list(zip(images.split(size), labels.split(size), strict=True))
    return list(pairs) if labelled else [image for image, _ in pairs]


@cache
def _state() -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Patterns().train()
        optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
        for step in range(80):
            images, labels = samples(64, seed=1000 + step)
            loss = F.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.state_dict()


def trained() -> Patterns:
    """A new copy of the trained net, in eval mode."""
    net = Patterns()
    net.load_state_dict(_state())
    return net.eval()
