"""The demo's data and model: scikit-learn's handwritten digits (8x8 pixels) and a small CNN trained on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import MissingExtraError
from sparsebit.progress import track

NUM_TEST = 597


@dataclass(frozen=True)
class Digits:
    """Images (N, 1, 8, 8), standardised, with labels (N,). The model is trained and calibrated on one part only."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits() -> Digits:
    """1,200 images for training, and the last 597, which no model sees before its test."""
    try:
        from sklearn import datasets
    except Exception:  # a broken package raises anything
        raise MissingExtraError("scikit-learn", "demo", "the demo's data set") from None
    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    train = images[:-NUM_TEST]
    images = (images - train.mean()) / train.std()
    return Digits(images[:-NUM_TEST], labels[:-NUM_TEST], images[-NUM_TEST:], labels[-NUM_TEST:])


class DigitNet(nn.Module):
    """A small net with typical difficulties of CNNs: batch norms to fold, residual adds, a depthwise convolution."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = _conv(1, width)
        self.block1 = Residual(width)
        self.depthwise = _conv(width, width, stride=2, groups=width)
        self.pointwise = _conv(width, 2 * width, kernel=1)
        self.block2 = Residual(2 * width)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.block1(self.stem(images))
        x = self.block2(self.pointwise(self.depthwise(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Residual(nn.Module):
    """Two convolutions with the input added to their output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = _conv(width, width)
        self.conv2 = _conv(width, width, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.conv2(self.conv1(x)))


def train(digits: Digits, *, epochs: int, seed: int) -> DigitNet:
    """Train a network from random weights; returned in eval mode. Deterministic per seed and machine."""
    batch_size = 64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DigitNet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.02)
        steps = epochs * (len(digits.train_images) // batch_size)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
        for _ in track(range(epochs), "training"):
            order = torch.randperm(len(digits.train_images))
            for chosen in order.split(batch_size)[: len(order) // batch_size]:
                logits = model(_shifted(digits.train_images[chosen]))
                loss = F.cross_entropy(logits, digits.train_labels[chosen], label_smoothing=0.05)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return model.eval()


def _conv(
    inputs: int, outputs: int, *, kernel: int = 3, stride: int = 1, groups: int = 1, relu: bool = True
) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), *([nn.ReLU()] if relu else []))


def _shifted(images: Tensor) -> Tensor:
    """Every image moved by up to one pixel, so that a thousand images last for many epochs."""
    N, _, H, W = images.shape
    padded = F.pad(images, (1, 1, 1, 1), mode="replicate")
    rows = torch.randint(3, (N, 1)) + torch.arange(H)
    columns = torch.randint(3, (N, 1)) + torch.arange(W)
    return padded[torch.arange(N)[:, None, None], 0, rows[:, :, None], columns[:, None, :]][:, None]
