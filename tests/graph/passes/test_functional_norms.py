from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.passes.functional_layers import lift_functional_norms
from tests.graph.passes.norms import with_statistics


class BatchNormAct(nn.BatchNorm2d):
    """Norm and activation in one layer, as timm has it."""

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        use_batch = self.training or (self.running_mean is None and self.running_var is None)
        mean = self.running_mean if not self.training or self.track_running_stats else None
        variance = self.running_var if not self.training or self.track_running_stats else None
        x = F.batch_norm(x, mean, variance, self.weight, self.bias, use_batch, self.momentum or 0.0, self.eps)
        return self.act(x)


class FrozenNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class AbsoluteNorm(nn.BatchNorm2d):
    """The weight is not used as it is."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight.abs(), self.bias, False, 0.1, self.eps)


class BatchNorm(nn.BatchNorm2d):
    """Always on the batch's own statistics."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, 0.0, self.eps)


class Unaffine(nn.BatchNorm2d):
    """It has a weight and does not use it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x
        return F.batch_norm(x, self.running_mean, self.running_var, None, None, False, 0.0, self.eps)


def captured_and_normalized(model: nn.Module) -> Any:
    region = capture(model).regions[""]
    lift_functional_norms(region.graph_module, region.source)
    return region


X = torch.randn(4, 3, 5, 5)


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}, {"eps": 0.1}], ids=str)
@pytest.mark.parametrize("is_root", [False, True], ids=["part", "root"])
def test_both_modes_come_back(options: dict[str, Any], is_root: bool) -> None:
    norm = with_statistics(BatchNormAct(3, **options))
    model = norm if is_root else nn.Sequential(nn.Conv2d(3, 3, 1), norm)
    region = captured_and_normalized(model)
    name = "norm" if is_root else "1.norm"
    inner = region.graph_module.get_submodule(name)
    assert type(inner) is nn.BatchNorm2d
    for mode in (False, True, True, False):
        if mode and options.get("momentum", 0) is None:
            continue  # the example above does not count batches right without a momentum
        model.train(mode)
        region.train(mode)
        torch.testing.assert_close(region.graph_module(X), model(X))
    torch.testing.assert_close(inner.running_mean, norm.running_mean)
    torch.testing.assert_close(region.source(X), model(X))  # the source's own code sees the same statistics


def test_statistics_stay_one_after_a_move() -> None:
    region = captured_and_normalized(nn.Sequential(with_statistics(BatchNormAct(3))))
    region.double().train()
    region.graph_module(X.double())
    region.eval()
    torch.testing.assert_close(region.source(X.double()), region.graph_module(X.double()))
    assert region.source[0].running_mean.dtype == torch.float64
    assert [key for key in region.graph_module.state_dict() if "running_mean" in key] == ["0.norm.running_mean"]


def test_a_norm_called_twice_is_one_module() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = with_statistics(BatchNormAct(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.norm(x))

    model = Twice().eval()
    region = captured_and_normalized(model)
    assert [n.target for n in region.graph_module.graph.nodes if n.op == "call_module"] == [
        "norm.norm", "norm.act", "norm.norm", "norm.act"
    ]  # fmt: skip
    torch.testing.assert_close(region.graph_module(X), model(X))


@pytest.mark.parametrize("kind", [FrozenNorm, AbsoluteNorm, BatchNorm, Unaffine])
def test_what_is_no_plain_batch_norm_stays(kind: type[nn.BatchNorm2d]) -> None:
    model = nn.Sequential(with_statistics(kind(3))).eval()
    region = captured_and_normalized(model)
    assert not [n for n in region.graph_module.graph.nodes if n.op == "call_module"]
    torch.testing.assert_close(region.graph_module(X), model(X))
    if kind is FrozenNorm:
        torch.testing.assert_close(region.train().graph_module(X), model.train()(X))


def test_batch_norm_without_an_owner_stays() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.randn(3))
            self.register_buffer("running_var", torch.rand(3) + 1)

        def forward(self, x: Tensor, mean: Tensor) -> Tensor:
            return F.batch_norm(x, self.running_mean, self.running_var) + F.batch_norm(x, mean, self.running_var)

    model = Functional()
    region = captured_and_normalized(model)
    mean = torch.randn(3)
    torch.testing.assert_close(region.graph_module(X, mean), model(X, mean))
