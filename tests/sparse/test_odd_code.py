"""Code in which a removed channel could change values silently: it is spared, or the small model is the masked one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.sparse import SparseModel, find_groups
from tests.sparse.nets import conv, images, rows


class Rows(nn.Module):
    """Two linear layers, with something odd between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("order", torch.randperm(8))
        self.register_buffer("is_first", torch.arange(8) < 4)
        self.register_buffer("mean", torch.zeros(8))
        self.scales, self.last = torch.rand(8) + 1, None

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.between(self.a(x)))

    def between(self, y: Tensor) -> Tensor:
        raise NotImplementedError


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 8), conv(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.between(self.a(x))).mean((2, 3)))

    def between(self, y: Tensor) -> Tensor:
        raise NotImplementedError


class PositionsInCode(Rows):
    def between(self, y: Tensor) -> Tensor:
        return y * (torch.arange(y.shape[1], dtype=y.dtype) + 1)


class Fractions(Rows):
    def between(self, y: Tensor) -> Tensor:
        return y * torch.linspace(0, 1, y.shape[1], dtype=y.dtype)


class PlainTensor(Rows):
    def between(self, y: Tensor) -> Tensor:
        return y * self.scales.to(y)


class Reordered(Rows):
    def between(self, y: Tensor) -> Tensor:
        return y[:, self.order]


class BooleanBuffer(Rows):
    def between(self, y: Tensor) -> Tensor:
        return torch.where(self.is_first, y, -y)


class WeightElsewhere(Rows):
    def between(self, y: Tensor) -> Tensor:
        return y * (1 + self.a.weight.pow(2).mean())


class CountOfWeights(Rows):
    def between(self, y: Tensor) -> Tensor:
        return y / self.a.weight.numel()


class Largest(Rows):
    def between(self, y: Tensor) -> Tensor:
        values, places = y.topk(2, 1)
        return torch.zeros_like(y).scatter(1, places, values)


class RunningSum(Rows):
    def between(self, y: Tensor) -> Tensor:
        return y.cumsum(1)


class Rolled(Rows):
    def between(self, y: Tensor) -> Tensor:
        return y + y.roll(1, 1)


class OtherBranch(Rows):
    """A branch that the example does not take."""

    def between(self, y: Tensor) -> Tensor:
        return y + y.softmax(1) if float(y.abs().max()) > 20 else y


class State(Rows):
    def between(self, y: Tensor) -> Tensor:
        before, self.last = self.last, y.detach()
        return y if before is None or before.shape != y.shape else y + before


class WritesBuffer(Rows):
    def between(self, y: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(y.mean(0) * 0.1)
        return y - self.mean


class ConstantSlices(Images):
    def between(self, y: Tensor) -> Tensor:
        return torch.cat([torch.relu(y[:, :4]), y[:, 4:] * 2], 1)


class WritesSlice(Images):
    def between(self, y: Tensor) -> Tensor:
        y = y.clone()
        y[:, 4:] = y[:, 4:] * 3
        return y


class Interleaved(Images):
    def between(self, y: Tensor) -> Tensor:
        return torch.cat([y[:, ::2], -y[:, 1::2]], 1)


class OverLargest(Images):
    def between(self, y: Tensor) -> Tensor:
        return y / (y.abs().amax(1, keepdim=True) + 1)


class OverSum(Images):
    """A removed channel would have counted as sigmoid(0)."""

    def between(self, y: Tensor) -> Tensor:
        y = torch.sigmoid(y)
        return y * y.sum(1, keepdim=True)


class OwnGroupNorm(Images):
    def between(self, y: Tensor) -> Tensor:
        parts = y.view(y.shape[0], 2, -1)
        return F.normalize(parts - parts.mean(-1, keepdim=True), dim=-1).view(y.shape)


class Standardized(Images):
    def between(self, y: Tensor) -> Tensor:
        weight = self.b.weight
        weight = weight - weight.mean((1, 2, 3), keepdim=True)
        return torch.relu(F.conv2d(y, weight, padding=1))


class WidthBranch(Rows):
    """Another path runs where fewer than three channels are left."""

    def between(self, y: Tensor) -> Tensor:
        return torch.relu(y) if y.shape[1] > 2 else y


class LooksAtHooks(Rows):
    """A run that is watched takes the same branch as one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(x)
        y = y if len(self.b._forward_hooks) > 0 else x - y
        return x


class WritesInput(Rows):
    """Run after run on one tensor, its values would overflow."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x.mul_(1e9)))


class ReturnsView(Rows):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = self.c(self.a(x))
        view = y.unsqueeze(1).squeeze(1)
        torch.mul(view, view, out=y)
        return view


ODD: tuple[type[nn.Module], ...] = (
    *(PositionsInCode, Fractions, PlainTensor, Reordered, BooleanBuffer, WeightElsewhere, CountOfWeights, Largest),
    *(RunningSum, Rolled, OtherBranch, State, WritesBuffer, ConstantSlices, WritesSlice, Interleaved, OverLargest),
    *(OverSum, OwnGroupNorm, Standardized, WidthBranch, LooksAtHooks, WritesInput),
)


@pytest.mark.sample(5)
@torch.no_grad()
@pytest.mark.parametrize("kind", ODD, ids=lambda kind: kind.__name__)
def test_nothing_changes_silently(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    batch = images() if issubclass(kind, Images) else rows()
    smodel = SparseModel(kind(), {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "RATIO": 0.6}}, batch).eval()
    smodel.calc_params()
    small, masked = smodel.shrink().eval(), smodel.masked_model().eval()
    for factor in (1, -1, 30):
        x = torch.randn(batch.shape[0] + 1, *batch.shape[1:]) * factor
        one, other = (copy.deepcopy(model)(x.clone()) for model in (masked, small))
        assert float((one - other).abs().max()) <= 1e-5 * float(one.abs().max())


class MixesTokens(nn.Module):
    """With one channel left the transposed values are contiguous, and torch takes another operator."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mix, self.c = nn.Linear(6, 8), nn.Linear(5, 5), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.mix(self.a(x).transpose(1, 2)).transpose(1, 2))


def test_one_channel_may_be_left() -> None:
    batch = torch.randn(2, 5, 6)
    smodel = SparseModel(
        MixesTokens(), {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "RATIO": 0.9}}, batch
    ).eval()
    smodel.calc_params()
    small = smodel.shrink()
    assert small.a.out_features == 1
    assert torch.allclose(small(batch), smodel(batch), atol=1e-6)


def test_a_view_that_is_written_into_can_be_returned() -> None:
    assert find_groups(ReturnsView().eval(), rows()).groups


def test_the_example_stays_as_it_is() -> None:
    batch = rows()
    before = batch.clone()
    assert find_groups(WritesInput().eval(), batch).groups
    assert torch.equal(batch, before)


def test_code_that_reads_values_is_in_the_report() -> None:
    found = find_groups(OtherBranch().eval(), rows())
    assert not found.groups
    assert any("reads values of tensors" in note for note in found.notes)
