from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.errors import CaptureError
from sparsebit.graph.capture import capture
from sparsebit.graph.passes.fold_batchnorm import can_fold, fold_batchnorm
from sparsebit.graph.passes.functional_layers import lift_functional_norms
from tests.graph.passes.norms import with_statistics


def norms(graph_module: nn.Module) -> int:
    return sum(isinstance(module, _BatchNorm) for module in graph_module.modules())


def check(model: nn.Module, x: Tensor, folded: int, *, with_example: bool = False) -> Any:
    model.eval()
    region = capture(model, example=((x,), {}) if with_example else None).regions[""]
    before = norms(region.graph_module)
    assert fold_batchnorm(region.graph_module) == folded
    assert norms(region.graph_module) == before - folded
    torch.testing.assert_close(region.graph_module(x), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(region.source(x), model(x), rtol=1e-4, atol=1e-5)  # its own code stays valid
    return region


LAYERS = {
    "conv1d": (nn.Conv1d, nn.BatchNorm1d, (7,)),
    "conv2d": (nn.Conv2d, nn.BatchNorm2d, (7, 6)),
    "conv3d": (nn.Conv3d, nn.BatchNorm3d, (4, 5, 4)),
    "transposed1d": (nn.ConvTranspose1d, nn.BatchNorm1d, (7,)),
    "transposed2d": (nn.ConvTranspose2d, nn.BatchNorm2d, (7, 6)),
    "transposed3d": (nn.ConvTranspose3d, nn.BatchNorm3d, (4, 5, 4)),
}


@pytest.mark.sample(31)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain-norm"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_convolution(name: str, bias: bool, groups: int, affine: bool) -> None:
    layer, norm, size = LAYERS[name]
    convolution = layer(4, 8, 3, stride=2, groups=groups, bias=bias)
    model = nn.Sequential(convolution, with_statistics(norm(8, affine=affine)), nn.ReLU())
    region = check(model, torch.randn(2, 4, *size), folded=1)
    assert region.graph_module.get_submodule("0").bias is not None


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("with_example", [True, False], ids=["example", "no-example"])
def test_linear(bias: bool, with_example: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias=bias), with_statistics(nn.BatchNorm1d(6)))
    check(model, torch.randn(5, 4), folded=1, with_example=with_example)


def test_linear_on_three_dimensions_is_not_folded() -> None:
    model = nn.Sequential(nn.Linear(4, 6), with_statistics(nn.BatchNorm1d(6)))
    x = torch.randn(5, 6, 4)  # (N, C, L): the norm scales the rows, the linear layer makes the columns
    check(model, x, folded=0, with_example=True)


def test_linear_folded_without_an_example_refuses_three_dimensions() -> None:
    model = nn.Sequential(nn.Linear(4, 6), with_statistics(nn.BatchNorm1d(6))).eval()
    region = capture(model).regions[""]
    fold_batchnorm(region.graph_module)
    for run in (region.graph_module, region.source, copy.deepcopy(region).graph_module):
        with pytest.raises(CaptureError, match=r"shape \(5, 6, 4\).*example_inputs"):
            run(torch.randn(5, 6, 4))


def test_a_norm_over_another_axis_is_not_folded() -> None:
    model = nn.Sequential(nn.Linear(5, 4), with_statistics(nn.BatchNorm2d(4)))
    check(model, torch.randn(2, 4, 3, 5), folded=0)


def test_dead_channels_stay_finite() -> None:
    norm = with_statistics(nn.BatchNorm2d(4))
    norm.running_var[1] = 0
    norm.weight.data[2] = 0
    check(nn.Sequential(nn.Conv2d(3, 4, 1), norm), torch.randn(2, 3, 4, 4), folded=1)


def test_frozen_layers_stay_frozen_and_types_are_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), with_statistics(nn.BatchNorm2d(4))).requires_grad_(False)
    region = check(model, torch.randn(2, 3, 4, 4), folded=1)
    layer = region.graph_module.get_submodule("0")
    assert not layer.weight.requires_grad and not layer.bias.requires_grad
    half = capture(model.bfloat16()).regions[""].graph_module
    fold_batchnorm(half)
    assert half.get_submodule("0").weight.dtype == half.get_submodule("0").bias.dtype == torch.bfloat16


class Branches(nn.Module):
    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.conv, self.conv2 = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.bn, self.bn2 = with_statistics(nn.BatchNorm2d(3)), with_statistics(nn.BatchNorm2d(3))
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def two_readers(self: Any, x: Tensor) -> Any:
    y = self.conv(x)
    return self.bn(y) + y


def two_norms(self: Any, x: Tensor) -> Any:
    y = self.conv(x)
    return self.bn(y) + self.bn2(y)


def layer_called_twice(self: Any, x: Tensor) -> Any:
    return self.bn2(self.conv(self.bn(self.conv(x))))


def norm_called_twice(self: Any, x: Tensor) -> Any:
    return self.bn(self.conv2(self.bn(self.conv(x))))


def layer_is_an_output(self: Any, x: Tensor) -> Any:
    y = self.conv(x)
    return self.bn(y), y


def shape_read(self: Any, x: Tensor) -> Any:
    y = self.conv(x)
    return self.bn(y).reshape(y.shape[0], -1)


def activation_between(self: Any, x: Tensor) -> Any:
    return self.bn(F.relu(self.conv(x)))


def two_pairs(self: Any, x: Tensor) -> Any:
    return self.bn2(self.conv2(self.bn(self.conv(x))))


@pytest.mark.parametrize(
    ("forward", "folded"),
    [
        (two_readers, 0), (two_norms, 0), (layer_called_twice, 0), (norm_called_twice, 0), (layer_is_an_output, 0),
        (shape_read, 1), (activation_between, 0), (two_pairs, 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_who_else_reads(forward: Any, folded: int) -> None:
    check(Branches(forward), torch.randn(2, 3, 4, 4), folded)


def test_tied_weights_are_not_folded() -> None:
    model = Branches(two_pairs)
    model.conv2.weight = model.conv.weight
    check(model, torch.randn(2, 3, 4, 4), folded=0)


def test_a_layer_that_opaque_code_calls_too_is_not_folded() -> None:
    class Opaque(nn.Module):
        def __init__(self, conv: nn.Module) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) if x.sum() > 0 else self.conv(-x)

    class Model(Branches):
        def __init__(self) -> None:
            super().__init__(None)
            self.opaque = Opaque(self.conv)

        def forward(self, x: Tensor) -> Tensor:
            return self.opaque(self.bn2(self.conv2(self.bn(self.conv(x)))))

    check(Model(), torch.randn(2, 3, 4, 4), folded=1)


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "prune"])
def test_a_weight_that_is_computed_is_not_folded(kind: str) -> None:
    conv = nn.Conv2d(3, 3, 1).eval()
    if kind == "prune":
        torch.nn.utils.prune.random_unstructured(conv, "weight", 0.5)
        conv.weight = conv.weight.detach()
    else:
        getattr(nn.utils.parametrizations, kind)(conv)
    check(nn.Sequential(conv, with_statistics(nn.BatchNorm2d(3))), torch.randn(2, 3, 4, 4), folded=0)


def test_a_norm_without_running_statistics_is_not_folded() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False))
    check(model, torch.randn(2, 3, 4, 4), folded=0)


def test_subclasses_and_wrong_sizes_cannot_fold() -> None:
    class Scaled(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) ** 2

    class Relu(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    assert can_fold(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    assert not can_fold(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(3))
    assert not can_fold(Scaled(3, 4, 1), nn.BatchNorm2d(4))
    assert not can_fold(nn.Conv2d(3, 4, 1), Relu(4))
    assert not can_fold(nn.Conv2d(3, 4, 1), None) and not can_fold(None, nn.BatchNorm2d(4))


def test_a_norm_with_activation_folds_after_normalize() -> None:
    class BatchNormAct(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            statistics = (self.running_mean, self.running_var, self.weight, self.bias)
            return F.batch_norm(x, *statistics, bool(self.training), 0.1, self.eps).relu()

    model = nn.Sequential(nn.Conv2d(3, 4, 1), with_statistics(BatchNormAct(4))).eval()
    region = capture(model).regions[""]
    lift_functional_norms(region.graph_module, region.source)
    assert fold_batchnorm(region.graph_module) == 1
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(region.graph_module(x), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(region.source(x), model(x), rtol=1e-4, atol=1e-5)
