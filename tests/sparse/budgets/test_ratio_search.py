"""Ratios under a budget: the smaller model keeps it, and channels that matter stay."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from sparsebit.errors import BudgetError, CalibrationError, ConfigError
from sparsebit.sparse import SparseModel, model_size
from sparsebit.sparse.budgets.ratio_search import KERNEL_WIDTHS
from tests.quantization.tiny import MaskFirst, Mixed, masked_batches
from tests.sparse.nets import Chain, Depthwise, Residual, Transformer, images

pytest.importorskip("scipy")


def smodel_of(model: nn.Module, example: object = None, **sparser: object) -> SparseModel:
    config = {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "STRATEGY": "l1norm", **sparser}}
    return SparseModel(model, config, images() if example is None else example).eval()


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [Chain, Residual, Depthwise])
@pytest.mark.parametrize("budgets", [{"macs": 0.6}, {"bytes": 0.6}, {"macs": 0.7, "bytes": 0.6}])
def test_the_smaller_model_keeps_the_budgets(kind: type[nn.Module], budgets: dict[str, float]) -> None:
    model = kind().eval()
    smodel = smodel_of(model)
    found = smodel.choose_ratios(budgets, [images(), images()])
    smodel.calc_params()
    before, after = model_size(model, images()), model_size(smodel.shrink(), images())
    assert all(getattr(after, name) <= share * getattr(before, name) for name, share in budgets.items())
    assert after == found.after and before == found.before and after.macs > 0.2 * before.macs
    assert str(found).startswith("macs: ")


def test_numbers_above_one_are_absolute() -> None:
    model = Residual().eval()
    macs = model_size(model, images()).macs
    smodel = smodel_of(model)
    smodel.choose_ratios({"macs": 0.5 * macs}, [images()])
    smodel.calc_params()
    assert 0.2 * macs < model_size(smodel.shrink(), images()).macs <= 0.5 * macs


def test_channels_that_the_output_does_not_need_go_first() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    with torch.no_grad():
        model[2].weight[:, 8:] = 0  # half of the first layer's neurons are not read
        model[0].weight[8:] *= 1e-3
    smodel = smodel_of(model, torch.randn(4, 8))
    found = smodel.choose_ratios({"macs": 0.65}, [torch.randn(32, 8)])
    assert found.ratios["0.weight"] >= 0.5 and found.ratios["2.weight"] <= 0.125


def test_costs_are_measured_on_the_first_samples() -> None:
    """Data beyond them change no choice and take no time: MobileNetV2 took 40 minutes on 64 images."""
    model = Residual().eval()
    first = torch.randn(40, *images().shape[1:])
    few, split, more = (
        list(itertools.chain(*smodel_of(model).ratio_options(batches).costs.values()))
        for batches in ([first[:32]], [first[:20], first[20:]], [first[:32], *[torch.randn_like(first)] * 20])
    )
    assert max(few) > 0 and split == pytest.approx(few) and more == few


def test_heads_and_spared_layers() -> None:
    example = torch.randn(2, 5, 6)
    smodel = smodel_of(Transformer(), example, SPARE=["up"])
    found = smodel.choose_ratios({"macs": 0.9}, [example])
    assert found.ratios["up.weight"] == 0.0 and max(found.ratios.values()) > 0


def test_what_cannot_be_is_refused() -> None:
    smodel = smodel_of(Chain())
    with pytest.raises(ConfigError, match="budget 'flops': allowed: macs, bytes, latency"):
        smodel.choose_ratios({"flops": 0.5}, [images()])
    with pytest.raises(ConfigError, match="no budget"):
        smodel.choose_ratios({}, [images()])
    with pytest.raises(CalibrationError, match="no batch"):
        smodel.choose_ratios({"macs": 0.5}, [])
    with pytest.raises(BudgetError, match="is the least that the options reach"):
        smodel.choose_ratios({"macs": 0.001}, [images()])
    with pytest.raises(ConfigError, match="SCOPE: layer"):
        smodel_of(Chain(), SCOPE="global").choose_ratios({"macs": 0.5}, [images()])


def test_multiplications_are_those_of_one_sample_whichever_argument_comes_first() -> None:
    (mask, x), (y, _) = masked_batches(first=True)[0], masked_batches(first=False)[0]
    assert model_size(MaskFirst(), (mask, x)).macs == model_size(Mixed(), (y, mask)).macs


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 32), nn.Linear(32, 48), nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(torch.relu(self.b(torch.relu(self.a(x)))))
        return y


@pytest.mark.parametrize(("macs", "round_to"), [(0.7, 16), (0.3, 8), (0.15, 8), (0.11, 1)])
def test_the_coarsest_widths_that_keep_and_use_the_budget_are_taken(macs: float, round_to: int) -> None:
    torch.manual_seed(0)
    model, batch = Wide().eval(), torch.randn(32, 6)
    smodel = smodel_of(model, batch)
    found = smodel.choose_ratios({"macs": macs}, [batch], round_to=KERNEL_WIDTHS)
    assert found.round_to == round_to
    smodel.calc_params()
    small = smodel.shrink()
    assert small.a.out_features % round_to == small.b.out_features % round_to == 0
    assert model_size(small, batch).macs == found.after.macs <= macs * found.before.macs
    masks = smodel.masks["b.weight"]
    assert small.b.weight.numel() == int(masks.any(1).sum()) * int(masks.any(0).sum())  # no zeros are kept for widths


def test_a_budget_that_no_width_keeps_is_an_error() -> None:
    with pytest.raises(BudgetError):
        smodel_of(Wide().eval(), torch.randn(8, 6)).choose_ratios(
            {"macs": 1e-4}, [torch.randn(8, 6)], round_to=KERNEL_WIDTHS
        )
