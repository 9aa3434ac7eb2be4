"""Small networks with branches that the first call does not take, and the calls that take each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Network:
    """`calls`: positional and keyword arguments of each call; the first one is the example."""

    make: Callable[[], nn.Module]
    calls: Callable[[], tuple[Call, ...]]
    folds: bool = False  # whether batch norms are folded, so that weights change when the model is built

    def fresh(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.make().eval()

    def some_calls(self) -> tuple[Call, ...]:
        torch.manual_seed(1)
        return self.calls()


class ChosenByNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 4)

    def forward(self, x: Tensor, i: int = 0) -> Tensor:
        return self.head(torch.relu(self.layers[i](x)))


class ChosenByShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.short, self.long, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.long(x) if x.shape[1] > 3 else self.short(x)))


class Levels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.laterals = nn.ModuleList(nn.Conv2d(3, 4, 1) for _ in range(3))
        self.head = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        return [self.head(lateral(x)) for lateral, x in zip(self.laterals, xs, strict=False)]


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.first(x)
        if mask is not None:
            x = x * torch.sigmoid(self.gate(mask))
        return self.head(x)


class ChosenByMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            x = x + self.extra(x)
        return self.head(torch.relu(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.inner = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)
        self.norm.running_mean.uniform_(-0.2, 0.2)  # type: ignore[operator, union-attr]
        self.norm.running_var.uniform_(0.5, 2)  # type: ignore[operator, union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        return self.head((x + self.inner(x)).mean((2, 3)))


class Tied(nn.Module):
    """Two names of one weight, and a layer that no call reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.mix, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + torch.tanh(self.mix(x)))


def _rows() -> Tensor:
    return torch.randn(4, 2, 6)


def _one(x: Any, **named: Any) -> Call:
    return (x,), named


NETWORKS: dict[str, Network] = {
    "residual": Network(Residual, lambda: (_one(torch.randn(2, 3, 6, 6)), _one(torch.randn(1, 3, 8, 8)))),
    "folded": Network(Residual, lambda: (_one(torch.randn(2, 3, 6, 6)), _one(torch.randn(1, 3, 8, 8))), folds=True),
    "tied": Network(Tied, lambda: (_one(torch.randint(0, 12, (2, 5))), _one(torch.randint(0, 12, (1, 3))))),
    "chosen by number": Network(ChosenByNumber, lambda: (_one(_rows()), _one(_rows(), i=1), _one(_rows(), i=2))),
    "chosen by shape": Network(ChosenByShape, lambda: (_one(_rows()), _one(torch.randn(2, 5, 6)))),
    "levels": Network(
        Levels,
        lambda: (
            _one([torch.randn(2, 3, 4, 4)]),
            _one([torch.randn(2, 3, 4, 4), torch.randn(2, 3, 2, 2), torch.randn(2, 3, 3, 3)]),
        ),
    ),
    "optional": Network(Optional, lambda: (_one(_rows()), _one(_rows(), mask=_rows()))),
    "chosen by mode": Network(ChosenByMode, lambda: (_one(_rows()), _one(torch.randn(1, 2, 6)))),
}
