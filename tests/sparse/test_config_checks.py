"""A config that does not fit the model is an error: globs without a match, and kinds that the model does not have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsebit.errors import ConfigError
from sparsebit.sparse import SparseModel
from tests.sparse.nets import Chain, Tied, Transformer, images, rows


def build(model: nn.Module, example: torch.Tensor | None = None, **sparser: object) -> SparseModel:
    return SparseModel(model, {"DEVICE": "cpu", "SPARSER": {"RATIO": 0.5, **sparser}}, example)


@pytest.mark.parametrize("kind", ["structured", "unstructured"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"SPARE": ["haed"]}, r"SPARSER.SPARE: the glob 'haed' matches no layer.*near names: head"),
        ({"SPARE": ["head", "stem.*"]}, r"SPARE: the glob 'stem\.\*' matches no layer"),
        ({"SPARE": ["head.weight"]}, r"'head\.weight' matches no layer.*near names: head"),
        ({"SPECIFIC": [{"heda": ["RATIO", 0.1]}]}, r"SPARSER.SPECIFIC: the glob 'heda' matches no layer.*head"),
        ({"SPECIFIC": [{"*": ["RATIO", 0.1]}, {"head": ["RATIO", 0.0]}]}, r"'head' has no effect: '\*'"),
    ],
)
def test_globs_without_effect_are_refused(kind: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        build(Chain(), images(), TYPE=kind, **options)
    assert "layers with weights: a, bn, b, head" in str(caught.value)


def test_the_name_of_a_part_that_holds_layers_is_no_layer() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 3))
    with pytest.raises(ConfigError, match=r"'0' holds layers: write '0\.\*'"):
        build(model, rows(), SPARE=["0"])
    assert build(model, rows(), SPARE=["0.*"], TYPE="unstructured").zeros.num_weights == 72


def test_names_of_the_first_sparsebit_of_tied_layers_and_of_norms_are_layers() -> None:
    build(nn.Sequential(nn.Sequential(nn.Linear(6, 8))), TYPE="unstructured", SPARE=["_0_0"])
    build(Tied(), TYPE="unstructured", SPARE=["head", "embed"])
    build(Chain(), images(), SPARE=["bn"], SPECIFIC=[{"b": ["RATIO", 0.25]}, {"*": ["RATIO", 0.75]}])


@pytest.mark.parametrize(
    ("model", "example", "granularity", "words"),
    [
        (Chain(), images(), "head", r"GRANULARITY=head: the model has no such channels.*2 groups of kind filter"),
        (Chain(), images(), "neuron", "GRANULARITY=neuron"),
        (Transformer(), torch.randn(2, 5, 6), "filter", "GRANULARITY=filter.*kind head.*kind neuron"),
        (Chain(), images(), "residual_block", "no residual block that can be removed"),
        (nn.Sequential(nn.Linear(6, 3)), rows(), "neuron", "no channels of the model can be removed; spared: 0"),
    ],
)
def test_a_kind_that_the_model_does_not_have_is_refused(
    model: nn.Module, example: torch.Tensor, granularity: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        build(model, example, GRANULARITY=granularity)


def test_a_model_of_which_no_channel_can_go_is_named(caplog: pytest.LogCaptureFixture) -> None:
    smodel = build(nn.Sequential(nn.Linear(6, 3)), rows())
    assert "no channels of the model can be removed; spared: 0.weight" in caplog.text
    smodel.calc_params()
    assert smodel.zeros.num_zeros == 0 and torch.equal(smodel.shrink()[0].weight, smodel.model[0].weight)


@pytest.mark.parametrize("kind", ["structured", "unstructured"])
def test_ratios_of_layers_that_cannot_be_pruned_are_named(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Softmax(1), nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    build(model, rows(), TYPE=kind, SPECIFIC=[{"2": ["RATIO", 0.3]}, {"3": ["RATIO", 0.3]}])
    assert "SPARSER.SPECIFIC: '2' has no effect: nothing of 2 can be pruned" in caplog.text
    assert "'3' has no effect" not in caplog.text


@pytest.mark.parametrize("kind", ["structured", "unstructured"])
def test_ratios_of_spared_layers_are_named(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    build(model, rows(), TYPE=kind, SPARE=["0"], SPECIFIC=[{"0": ["RATIO", 0.3]}, {"2": ["RATIO", 0.3]}])
    assert "SPARSER.SPECIFIC: '0' has no effect: SPARE has 0 too" in caplog.text
    assert "'2' has no effect" not in caplog.text


def test_globs_of_residual_blocks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.a(x)

    model = nn.Sequential(Block(), Block(), nn.Linear(6, 3))
    build(model, rows(), GRANULARITY="residual_block", SPARE=["0"])
    with pytest.raises(ConfigError, match="'3' matches no layer"):
        build(model, rows(), GRANULARITY="residual_block", SPARE=["3"])


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no weight that can be masked; left alone: 0\.weight: a table"):
        build(nn.Sequential(nn.Embedding(4, 6), nn.LayerNorm(6)), TYPE="unstructured")
