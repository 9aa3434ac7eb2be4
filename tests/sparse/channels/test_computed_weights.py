"""Convolutions that standardize their weight are pruned with the weight that they computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.sparse import SparseModel, load, save
from sparsebit.sparse.channels.computed_weights import computed_layers
from sparsebit.sparse.group_search import find_groups
from tests.sparse.nets import images


class Standardized(nn.Conv2d):
    """Weight standardization with a gain per filter."""

    def __init__(self, inputs: int, outputs: int, **options: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1, **options)
        self.gain = nn.Parameter(torch.rand(outputs, 1, 1, 1) + 0.5)

    def computed(self) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        spread = self.weight.var((1, 2, 3), keepdim=True, unbiased=False)
        return self.gain * (self.weight - mean) / (spread + 1e-5).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.computed(), self.bias, self.stride, self.padding, 1, self.groups)


class ByBatchNorm(Standardized):
    def computed(self) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        return F.batch_norm(flat, None, None, self.gain.view(-1), training=True).reshape_as(self.weight)


class PadsItself(Standardized):
    """TensorFlow's SAME padding, which is not symmetric at stride 2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.stride, self.padding = (2, 2), (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        pads = [max((-(-size // 2) - 1) * 2 + 3 - size, 0) for size in (x.shape[3], x.shape[2])]
        return super().forward(F.pad(x, [part for pad in pads for part in (pad // 2, pad - pad // 2)]))


class PadsBehind(Standardized):
    """Like SAME padding for even sizes alone."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.stride, self.padding = (2, 2), (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 1, 0, 1)))


class Net(nn.Module):
    def __init__(self, kind: type[Standardized] = Standardized) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = kind(3, 8), kind(8, 10), kind(10, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.a(x))
        return self.head(torch.relu_(self.c(torch.relu_(self.b(x)))).mean((2, 3)))


@pytest.mark.parametrize("kind", [Standardized, ByBatchNorm, PadsItself])
def test_a_shrunk_model_equals_the_masked_one(kind: type[Standardized], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Net(kind).eval(), torch.randn(2, 3, 16, 16)
    smodel = SparseModel(model, {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "RATIO": 0.5}}, batch).eval()
    smodel.calc_params()
    small = smodel.shrink()
    assert (small.b.weight.shape[:2], small.c.weight.shape[:2]) == ((5, 4), (4, 5))
    assert small.b.gain is None and isinstance(model.b, kind)
    assert torch.allclose(small(batch), smodel(batch), atol=1e-5)
    save(small, tmp_path / "small")
    assert torch.equal(load(tmp_path / "small", Net(kind)).eval()(batch), small(batch))


class Cast(nn.Conv2d):
    """Code of its own, and a plain weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight.to(x.dtype) * 2, self.bias, self.stride, self.padding)


def test_a_layer_whose_input_channels_stay_apart_keeps_its_class() -> None:
    model = nn.Sequential(Cast(3, 8, 1), nn.ReLU(), Cast(8, 4, 1), nn.Flatten(), nn.LazyLinear(2)).eval()
    model(images())
    assert computed_layers(model, ((images(),), {})) == {}
    found = find_groups(model, images())
    assert {axis for group in found.groups for axis in group.axes} >= {("0.weight", 0), ("2.weight", 1)}


class Flipping(Standardized):
    """No plain convolution gives this."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(2) * 3


def test_a_layer_that_does_more_is_left_alone() -> None:
    model = Net(Flipping).eval()
    assert computed_layers(model, ((images(),), {})) == {}
    found = find_groups(model, images())
    assert ("b.weight", 1) not in {axis for group in found.groups for axis in group.axes}


def test_padding_that_only_the_size_of_the_example_explains_is_not_replaced() -> None:
    model, batch = Net(PadsBehind).eval(), torch.randn(2, 3, 8, 8)
    smodel = SparseModel(model, {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "RATIO": 0.5}}, batch).eval()
    smodel.calc_params()
    small, odd = smodel.shrink(), torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        torch.testing.assert_close(small(odd), smodel.model(odd), rtol=1e-4, atol=1e-5)
