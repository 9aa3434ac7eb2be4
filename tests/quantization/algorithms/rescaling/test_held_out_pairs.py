"""Equalization and smoothing keep only what does not hurt on held-out samples, and say what they revert."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from sparsebit.quantization import QuantModel
from sparsebit.quantization.algorithms.rescaling import held_out_pairs
from sparsebit.quantization.algorithms.rescaling.equalization import equalize
from sparsebit.quantization.algorithms.rescaling.held_out_pairs import REVERTED
from sparsebit.quantization.algorithms.rescaling.smoothing import smooth
from tests.quantization.tiny import calibrated, qconfig

ALGORITHMS = {"equalize": equalize, "smooth": smooth}


def mlp(seed: int) -> nn.Module:
    """A net whose channels differ in size."""
    torch.manual_seed(seed)
    layers = [nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)]
    with torch.no_grad():
        for layer in layers:
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(torch.exp(torch.randn(len(layer.weight), 1)))
    return nn.Sequential(*layers).eval()


@torch.no_grad()
def sqnr(qmodel: QuantModel, model: nn.Module, x: Tensor) -> float:
    found, expected = qmodel(x), model(x)
    return 10 * math.log10(float(expected.square().sum() / (found - expected).square().sum()))


@pytest.mark.parametrize("num_samples", [2, 4])
def test_few_samples_absorb_no_bias(num_samples: int) -> None:
    """The smallest of 4 values is not the smallest of all: what was taken for constant changed the float model."""
    model = mlp(5)
    x, others = torch.randn(num_samples, 16), torch.randn(512, 16)
    qmodel = calibrated(model, [x], qconfig({"W.QSCHEME": "per-tensor-symmetric"}, bits=6))
    before = sqnr(qmodel, model, others)
    equalize(qmodel, [x])
    assert sqnr(qmodel, model, others) > before - 1
    qmodel.set_quant()
    assert sqnr(qmodel, model, others) > 100


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_hurts_is_reverted_and_said(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = mlp(0), torch.randn(16, 16)
    qmodel = calibrated(model, [x])
    before = {key: value.clone() for key, value in qmodel.state_dict().items() if "quantizer" not in key}
    errors = iter([1.0, *[2.0] * 20])
    monkeypatch.setattr(held_out_pairs.HeldOutJudge, "_error", lambda *args: next(errors))
    found = ALGORITHMS[name](qmodel, [x])
    assert all(result.num_scaled == 0 for result in found.values())
    assert any(REVERTED in result.reason for result in found.values())
    assert f"{name}: reverted for" in caplog.text and "from 1 to 2 of the output" in caplog.text
    after = qmodel.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert qmodel.is_quantized("weight")


def test_only_the_pairs_that_hurt_are_reverted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp(0), torch.randn(16, 16)
    qmodel = calibrated(model, [x])
    errors = iter([1.0, 2.0, 0.9, 2.0])  # as it is, all pairs, the first half, both
    monkeypatch.setattr(held_out_pairs.HeldOutJudge, "_error", lambda *args: next(errors))
    found = equalize(qmodel, [x])
    assert [result.num_scaled > 0 for result in found.values()] == [True, False]
    qmodel.set_quant()
    assert sqnr(qmodel, model, torch.randn(64, 16)) > 100


def test_few_samples_are_all_held_out_once() -> None:
    qmodel = calibrated(mlp(0), [torch.randn(6, 16)])
    qmodel.set_quant()
    store = held_out_pairs.SharedData(device_bytes=0, host_bytes=1 << 20)
    for index, rows in enumerate((4, 2)):
        store.put(index, ((torch.randn(rows, 16),), {}))
    splits = held_out_pairs.HeldOutJudge(qmodel, store).splits
    held = [
        (piece.batch, row)
        for split in splits
        for piece in split.held
        for row in piece.rows or range((4, 2)[piece.batch])
    ]
    assert len(splits) == 4 and sorted(held) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("num_samples", "is_kept"), [(7, False), (8, True)])
def test_with_a_handful_of_samples_only_a_clear_gain_counts(
    name: str, num_samples: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = mlp(0), torch.randn(num_samples, 16)
    qmodel = calibrated(model, [x])
    errors = (0.95**step for step in itertools.count())
    monkeypatch.setattr(held_out_pairs.HeldOutJudge, "_error", lambda *args: next(errors))
    found = ALGORITHMS[name](qmodel, [x])
    if name == "equalize" or not is_kept:  # smoothing finds nothing to scale here
        assert any(result.num_scaled > 0 for result in found.values()) == is_kept
    told = f"{name}: 7 calibration samples are too few to judge on held-out ones"
    assert (told in caplog.text) != is_kept
