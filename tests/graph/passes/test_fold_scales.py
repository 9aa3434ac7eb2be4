"""Factors behind a layer become part of it, in the graph and in the model's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.passes.fold_scales import fold_scales
from sparsebit.graph.passes.functional_layers import lift_functional_norms
from sparsebit.quantization import QuantModel
from tests.quantization.tiny import qconfig


class Scaled(nn.Module):
    """`gamma * layer(x)`, with `gamma` in a shape; `reshape`: to this one, when it is called."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], reshape: tuple[int, ...] = (), dropout: float = 0.0):
        super().__init__()
        self.layer, self.dropout, self.reshape = layer, nn.Dropout(dropout), reshape
        self.gamma = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        gamma = self.gamma.reshape(*self.reshape) if self.reshape else self.gamma
        return torch.relu(self.dropout(self.layer(x)).mul(gamma))


def check(model: nn.Module, x: Tensor, folded: int) -> Any:
    model.eval()
    region = capture(model, example=((x,), {})).regions[""]
    lift_functional_norms(region.graph_module, region.source)
    assert fold_scales(region.graph_module) == folded
    torch.testing.assert_close(region.graph_module(x), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(region.source(x), model(x), rtol=1e-4, atol=1e-5)  # its own code stays valid
    return region


IMAGES = torch.randn(2, 4, 6, 6)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(
    ("shape", "reshape"), [((6, 1, 1), ()), ((1, 6, 1, 1), ()), ((6,), (1, -1, 1, 1))], ids=["3", "4", "reshaped"]
)
def test_convolutions(bias: bool, shape: tuple[int, ...], reshape: tuple[int, ...]) -> None:
    region = check(Scaled(nn.Conv2d(4, 6, 3, groups=2, bias=bias), shape, reshape, dropout=0.1), IMAGES, 1)
    assert not [node for node in region.graph_module.graph.nodes if "mul" in str(node.target)]


def test_linear_layers_and_one_dimension() -> None:
    check(Scaled(nn.Linear(6, 5), (5,)), torch.randn(2, 3, 6), 1)
    check(Scaled(nn.Conv1d(4, 6, 3), (6, 1)), torch.randn(2, 4, 9), 1)


@pytest.mark.parametrize(
    ("layer", "shape", "x"),
    [
        (nn.Conv2d(4, 6, 1), (6,), IMAGES),  # along the width
        (nn.Conv2d(4, 6, 1), (6, 1), IMAGES),
        (nn.Conv2d(4, 6, 1), (1,), IMAGES),
        (nn.Conv2d(4, 6, 1), (2, 6, 1, 1), IMAGES),
        (nn.Conv2d(4, 6, 1), (6, 6, 6), IMAGES),
        (nn.Linear(6, 6), (6, 1), torch.randn(6, 6)),
        (nn.Linear(6, 5), (1, 1, 5), torch.randn(3, 6)),  # the product has an axis more
        (nn.Conv2d(4, 6, 1), (1, 6, 1, 1), IMAGES[0]),  # here too
        (nn.Conv2d(4, 6, 1).bfloat16(), (6, 1, 1), IMAGES.bfloat16()),  # float32 factors: the product is float32
        (nn.ConvTranspose2d(4, 6, 1), (6, 1, 1), IMAGES),
    ],
    ids=["width", "height", "one", "batch", "places", "rows", "more axes", "one image", "types", "transposed"],
)
def test_other_factors_stay(layer: nn.Module, shape: tuple[int, ...], x: Tensor) -> None:
    check(Scaled(layer, shape), x, 0)


def test_without_an_example() -> None:
    for shape, folded in (((6, 1, 1), 1), ((1, 6, 1, 1), 0)):
        model = Scaled(nn.Conv2d(4, 6, 1), shape).eval()
        region = capture(model).regions[""]
        assert fold_scales(region.graph_module) == folded
        torch.testing.assert_close(region.graph_module(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-5)


def test_what_others_read_stays() -> None:
    class Read(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y * self.gamma + y  # type: ignore[no-any-return]

    class Twice(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.gamma + self.gamma  # type: ignore[no-any-return]

    class Again(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.relu(self.layer(x) * self.gamma))  # type: ignore[no-any-return]

    for kind in (Read, Twice, Again):
        check(kind(nn.Conv2d(4, 4, 1), (4, 1, 1)), IMAGES, 0)
    tied = nn.Sequential(Scaled(nn.Conv2d(4, 4, 1), (4, 1, 1)), Scaled(nn.Conv2d(4, 4, 1), (4, 1, 1)))
    tied[1].gamma = tied[0].gamma
    check(tied, IMAGES, 0)
    watched = Scaled(nn.Conv2d(4, 4, 1), (4, 1, 1))
    watched.layer.register_forward_hook(lambda module, args, output: output + 1)
    check(watched, IMAGES, 0)
    buffered = Scaled(nn.Conv2d(4, 4, 1), (4, 1, 1))
    del buffered.gamma
    buffered.register_buffer("gamma", torch.randn(4, 1, 1))
    check(buffered, IMAGES, 0)


def test_the_config_decides() -> None:
    model = Scaled(nn.Conv2d(4, 4, 1), (4, 1, 1)).eval()
    folded = QuantModel(model, qconfig({"SCHEDULE.FUSE_BN": True}), example_inputs=IMAGES)
    kept = QuantModel(model, qconfig({"SCHEDULE.FUSE_BN": True, "SCHEDULE.FOLD_SCALES": False}), example_inputs=IMAGES)
    assert len(folded.plan) < len(kept.plan)
    for one in (folded, kept):
        torch.testing.assert_close(one(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-5)
