"""Branches become one convolution that computes their sum, in the graph and in the model's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebit
from sparsebit.graph.capture import capture
from sparsebit.graph.passes.functional_layers import lift_functional_norms
from sparsebit.graph.passes.functionalize import functionalize
from sparsebit.graph.passes.merge_branches import merge_branches
from sparsebit.graph.passes.simplify import simplify
from sparsebit.quantization import QuantModel
from tests.graph.passes.norms import with_statistics
from tests.quantization.tiny import qconfig


class Sum(nn.Module):
    """`relu` of the sum of all branches of x, and of x itself if asked for."""

    def __init__(self, *branches: nn.Module, adds_input: bool = False) -> None:
        super().__init__()
        self.branches, self.adds_input = nn.ModuleList(branches), adds_input

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = sum(branch(x) for branch in self.branches)  # type: ignore[assignment]
        if self.adds_input:
            total = total + x
        return torch.relu(total)


def check(model: nn.Module, x: Tensor, merged: int) -> Any:
    model.eval()
    region = capture(model, example=((x,), {})).regions[""]
    functionalize(region.graph_module)
    simplify(region.graph_module)
    lift_functional_norms(region.graph_module, region.source)
    assert merge_branches(region.graph_module) == merged
    torch.testing.assert_close(region.graph_module(x), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(region.source(x), model(x), rtol=1e-4, atol=1e-5)  # its own code stays valid
    return region


def layers(region: Any) -> int:
    return len([node for node in region.graph_module.graph.nodes if node.op == "call_module"])


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_a_block_of_repvgg(groups: int, bias: bool) -> None:
    options = {"groups": groups, "bias": bias}
    branches = (
        nn.Conv2d(8, 8, 3, padding=1, **options),
        nn.Conv2d(8, 8, 1, **options),
        with_statistics(nn.BatchNorm2d(8)),
    )
    region = check(Sum(*branches), torch.randn(2, 8, 7, 6), 2)
    assert layers(region) == 1
    assert len(region.graph_module.graph.nodes) == 4  # x, the convolution, relu, the output: no addition of zero


@pytest.mark.parametrize(
    ("convolution", "batch_norm", "size"),
    [(nn.Conv1d, nn.BatchNorm1d, (9,)), (nn.Conv3d, nn.BatchNorm3d, (4, 5, 6))],
    ids=["1d", "3d"],
)
def test_other_dimensions(convolution: Any, batch_norm: Any, size: tuple[int, ...]) -> None:
    branches = (
        convolution(4, 4, 5, padding=2),
        convolution(4, 4, 3, padding=1),
        with_statistics(batch_norm(4, affine=False)),
    )
    check(Sum(*branches), torch.randn(2, 4, *size), 2)


def test_strides_dilation_and_kernels_that_are_not_square() -> None:
    x = torch.randn(2, 4, 9, 11)
    check(Sum(nn.Conv2d(4, 6, 3, 2, 1), nn.Conv2d(4, 6, 1, 2)), x, 1)
    wide = nn.Conv2d(4, 4, (3, 5), padding=(2, 4), dilation=2), nn.Conv2d(4, 4, (1, 3), padding=(0, 2), dilation=2)
    check(Sum(*wide, with_statistics(nn.BatchNorm2d(4))), x, 2)
    check(Sum(nn.Conv2d(4, 4, (1, 3), padding=(0, 1)), nn.Conv2d(4, 4, (3, 1), padding=(1, 0))), x, 0)


@pytest.mark.parametrize(
    "branches",
    [
        (nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=2)),
        (nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=2, dilation=2)),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.Conv2d(4, 4, 1)),
        (nn.Conv2d(4, 4, 3, padding="same"), nn.Conv2d(4, 4, 1)),
        (nn.BatchNorm2d(4), nn.BatchNorm2d(4)),
        (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, track_running_stats=False)),
        (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()), nn.Conv2d(4, 4, 1)),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3, padding=1)), nn.Conv2d(4, 4, 1)),
    ],
    ids=["groups", "dilation", "reflect", "same", "norms", "batch statistics", "activation", "weight norm"],
)
def test_what_one_convolution_cannot_compute_stays(branches: tuple[nn.Module, ...]) -> None:
    check(Sum(*branches), torch.randn(2, 4, 7, 7), 0)


def test_other_terms_stay_in_the_sum() -> None:
    region = check(Sum(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), adds_input=True), torch.randn(2, 4, 7, 7), 1)
    assert len(region.graph_module.graph.nodes) == 5


class Difference(Sum):
    def forward(self, x: Tensor) -> Tensor:
        one, other, *rest = (branch(x) for branch in self.branches)
        return torch.relu(x - (other - one) - sum(rest))  # type: ignore[no-any-return]


def test_differences() -> None:
    branches = nn.Conv2d(4, 4, 3, padding=1), with_statistics(nn.BatchNorm2d(4)), nn.Conv2d(4, 4, 1)
    region = check(Difference(*branches), torch.randn(2, 4, 7, 7), 2)
    assert len(region.graph_module.graph.nodes) == 5


def test_a_term_that_is_there_twice() -> None:
    class Twice(Sum):
        def forward(self, x: Tensor) -> Tensor:
            one, other = (branch(x) for branch in self.branches)
            y = torch.tanh(x)
            return y + y + one + other  # type: ignore[no-any-return]

    check(Twice(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)), torch.randn(2, 4, 7, 7), 1)


def test_layers_that_others_use_stay() -> None:
    shared = nn.Conv2d(4, 4, 1)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.shared = nn.Conv2d(4, 4, 3, padding=1), shared

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.wide(x) + self.shared(x)
            return self.shared(torch.relu(y))  # type: ignore[no-any-return]

    class Read(Sum):
        def forward(self, x: Tensor) -> Tensor:
            one, other = (branch(x) for branch in self.branches)
            return (one + other) * other  # type: ignore[no-any-return]

    check(Twice(), torch.randn(2, 4, 7, 7), 0)
    check(Read(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)), torch.randn(2, 4, 7, 7), 0)
    tied = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
    tied[1].weight = tied[0].weight
    check(Sum(*tied), torch.randn(2, 4, 7, 7), 0)
    watched = nn.Conv2d(4, 4, 1)
    watched.register_forward_hook(lambda module, args, output: output * 2)
    check(Sum(nn.Conv2d(4, 4, 3, padding=1), watched), torch.randn(2, 4, 7, 7), 0)


def network() -> nn.Module:
    torch.manual_seed(0)
    block = Sum(nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1), with_statistics(nn.BatchNorm2d(8)))
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), block, nn.Flatten(), nn.Linear(8 * 36, 5)).eval()


def test_the_config_decides() -> None:
    branch = "2.branches.1.weight"
    folded = {"SCHEDULE.FUSE_BN": True}
    assert branch not in QuantModel(network(), qconfig(folded)).plan
    assert branch in QuantModel(network(), qconfig({**folded, "SCHEDULE.MERGE_BRANCHES": False})).plan
    assert branch in QuantModel(network(), qconfig()).plan


@torch.no_grad()
def test_a_merged_model_is_quantized_saved_and_exported(tmp_path: Any) -> None:
    model, x = network(), torch.randn(5, 3, 8, 8)
    qmodel = sparsebit.quantize(model, list(torch.randn(4, 8, 3, 8, 8)), "onnxruntime")
    assert float((qmodel(x) - model(x)).norm() / model(x).norm()) < 0.1
    qmodel.save(tmp_path / "saved")
    loaded = QuantModel.load(tmp_path / "saved", network())
    assert torch.equal(loaded(x), qmodel(x))
    loaded.export_onnx(x[:1], tmp_path / "model.onnx")  # through the parity gate
