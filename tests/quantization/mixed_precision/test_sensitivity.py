from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsebit
from sparsebit.errors import CalibrationError, ConfigError, RecordError
from sparsebit.quantization import QuantModel, Sensitivity, gptq, sensitivity
from sparsebit.quantization.mixed_precision.sensitivity_math import (
    divergence,
    fisher_direction,
    products,
    value_direction,
)
from tests.quantization.tiny import MaskFirst, Mixed, masked_batches

CONFIG = "{DEVICE: cpu, W: {QUANTIZER: {BIT: 8}}, A: {QUANTIZER: {BIT: 8}, QADD: {ENABLE_QUANT: true}}}"


class Net(nn.Module):
    """A layer that matters (its outputs are large), one that hardly does, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.strong, self.weak = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 6, 3, padding=1)
        self.head = nn.Linear(6, 5)
        with torch.no_grad():
            self.weak.weight.mul_(0.02)
            self.head.weight.mul_(6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.strong(x)) + self.weak(x)
        return self.head(y.mean((2, 3)))


def batches(count: int = 3) -> list[Tensor]:
    return list(torch.randn(count, 8, 3, 6, 6, generator=torch.Generator().manual_seed(1)))


def calibrated(config: Any = CONFIG, model: nn.Module | None = None) -> QuantModel:
    return sparsebit.quantize(model or Net().eval(), batches(), config)


@pytest.mark.parametrize("method", ["gradient", "sqnr", "kl"])
def test_ranks_layers_and_bits(method: Any) -> None:
    found = sensitivity(calibrated(), batches(), method=method, weight_bits=(3, 4, 8), activation_bits=(4,))
    scores = found.scores
    assert scores["strong.weight"][3] > 5 * scores["weak.weight"][3] > 0
    for row in scores.values():
        assert list(row) == sorted(row)
        assert row[min(row)] > row[8] > 0 or len(row) == 1
    assert set(scores["head.input"]) == {4, 8}
    assert found.num_samples == 24 and found.method == method and found.seconds > 0


def test_the_gradient_predicts_the_divergence_of_a_small_error() -> None:
    """Averaged over samples and over directions, the score is the true KL to second order."""
    qmodel, data = calibrated(), list(torch.randn(3, 64, 3, 6, 6, generator=torch.Generator().manual_seed(2)))
    found = [sensitivity(qmodel, data, weight_bits=(6,), temperature=1, seed=100 * seed).scores for seed in range(4)]
    true = sensitivity(qmodel, data, weight_bits=(6,), method="kl").scores
    for site in ("strong.weight", "head.weight", "weak.weight"):
        assert sum(scores[site][6] for scores in found) / 4 == pytest.approx(true[site][6], rel=0.25)


def test_values_that_are_no_scores() -> None:
    """The gradient's score of values is the noise relative to the signal, as `sqnr` measures it."""
    qmodel, data = calibrated(), list(torch.randn(12, 24, 3, 6, 6, generator=torch.Generator().manual_seed(2)))
    fast = sensitivity(qmodel, data, weight_bits=(6,), outputs="values").scores
    true = sensitivity(qmodel, data, weight_bits=(6,), method="sqnr").scores
    assert fast["strong.weight"][6] == pytest.approx(true["strong.weight"][6], rel=0.35)


def test_a_loss_with_labels() -> None:
    labelled = [(x, torch.arange(8) % 5) for x in batches()]
    found = sensitivity(
        calibrated(), labelled, weight_bits=(4,), loss=lambda output, batch: F.cross_entropy(output, batch[1])
    )
    assert found.scores["strong.weight"][4] > found.scores["strong.weight"][8] > 0


def test_deterministic_and_nothing_is_changed() -> None:
    qmodel, data = calibrated(), batches()
    before, x = {key: value.clone() for key, value in qmodel.state_dict().items()}, data[0]
    output, trainable = qmodel(x), [p.requires_grad for p in qmodel.parameters()]
    first = sensitivity(qmodel, data, weight_bits=(2, 4), activation_bits=(4,)).scores
    assert sensitivity(qmodel, data, weight_bits=(2, 4), activation_bits=(4,)).scores == first
    assert torch.equal(qmodel(x), output)
    assert [p.requires_grad for p in qmodel.parameters()] == trainable
    assert all(torch.equal(value, before[key]) for key, value in qmodel.state_dict().items())
    assert all(p.grad is None for p in qmodel.parameters())


class Shared(nn.Module):
    """A layer that is called twice, writes in place, an embedding, a recurrent layer, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.fc = nn.Embedding(10, 6), nn.Linear(6, 6)
        self.rnn = nn.GRU(6, 4, batch_first=True)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.fc(self.table(ids)), inplace=True)
        x = self.fc(x)
        return {"states": self.rnn(x)[0], "mean": x.mean(1)}


@pytest.mark.parametrize("method", ["gradient", "sqnr"])
def test_layers_of_all_kinds(method: Any) -> None:
    data = [torch.randint(10, (4, 7), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    qmodel = sparsebit.quantize(Shared().eval(), data, CONFIG)
    scores = sensitivity(qmodel, data, method=method, weight_bits=(3,)).scores
    assert {"table.weight", "fc.weight", "rnn.weight_ih_l0"} <= set(scores)
    assert all(scores[site][3] > scores[site][8] > 0 for site in ("table.weight", "fc.weight", "rnn.weight_ih_l0"))


def test_bits_that_the_backend_does_not_run_are_left_out() -> None:
    qmodel = calibrated(
        "{BACKEND: onnxruntime, DEVICE: cpu, W: {QUANTIZER: {BIT: 8}}, A: {QUANTIZER: {DISABLE: true}}}"
    )
    scores = sensitivity(qmodel, batches(), weight_bits=(2, 3, 4, 8)).scores
    assert set(scores["strong.weight"]) == {2, 4, 8}
    beside_int8 = calibrated("onnxruntime")
    assert set(sensitivity(beside_int8, batches(), weight_bits=(4,)).scores["strong.weight"]) == {8}


def test_json_and_table() -> None:
    found = sensitivity(calibrated(), batches(), weight_bits=(4,))
    assert Sensitivity.from_dict(json.loads(found.to_json())) == found
    table = str(found).splitlines()
    assert table[0].split() == ["site", "4", "bits", "8", "bits"] and len(table) == 1 + len(found.scores)
    with pytest.raises(RecordError, match=r"Sensitivity.to_dict\(\)"):
        Sensitivity.from_dict({"scores": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "hessian"}, "allowed: gradient, sqnr, kl"),
        ({"outputs": "labels"}, "allowed: auto, scores, values"),
        ({"method": "kl", "outputs": "values"}, "allowed: method='sqnr' for values"),
        ({"method": "sqnr", "loss": lambda *_: None}, "allowed: a loss with method='gradient'"),
        ({"temperature": 0}, "numbers above 0"),
        ({"weight_bits": (0,)}, "allowed: a list of whole numbers from 1 to 16"),
        ({"weight_bits": 4}, "candidate bits 4: allowed: a list"),
        ({"weight_bits": ("4",)}, "candidate bits"),
        ({"loss": lambda *_: 1.0}, "it returned float; it must return the mean loss"),
        ({"loss": lambda output, _: output.sum(1)}, "it returned a tensor of shape"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sensitivity(calibrated(), batches(), **options)


def test_needs_calibration_and_data() -> None:
    with pytest.raises(CalibrationError, match="needs a calibrated model"):
        sensitivity(QuantModel(Net().eval(), CONFIG), batches())
    with pytest.raises(CalibrationError, match="no data"):
        sensitivity(calibrated(), [])


class TestMath:
    def test_directions_have_the_covariance_of_the_fisher_matrix(self) -> None:
        generator = torch.Generator().manual_seed(0)
        scores = torch.tensor([[2.0, 0.0, -1.0]])
        p = scores.softmax(-1)[0]
        drawn = fisher_direction(scores.expand(40000, 3), generator)
        assert torch.allclose(drawn.T @ drawn / len(drawn), torch.diag(p) - p[:, None] * p, atol=0.01)
        values = value_direction(torch.full((20000, 2), 3.0), generator)
        assert torch.allclose(values.T @ values / len(values), 2 * torch.eye(2) / 18, atol=0.01)

    def test_products_by_sample_or_of_all(self) -> None:
        g, d = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
        assert products(g, d, 2).tolist() == [3.0, 12.0]
        assert products(g, d, 4).tolist() == [15.0]

    def test_divergence_is_zero_for_equal_distributions(self) -> None:
        x = torch.randn(4, 3)
        assert float(divergence(x + 5, x)) == pytest.approx(0, abs=1e-6)
        assert float(divergence(x.flip(1), x)) > 0


@pytest.mark.parametrize("method", ["gradient", "sqnr", "kl"])
def test_samples_are_counted_whichever_argument_comes_first(method: Any) -> None:
    found = [
        sensitivity(
            sparsebit.quantize(model, masked_batches(first=first), CONFIG),
            masked_batches(first=first),
            method=method,
            weight_bits=(4, 8),
        )
        for model, first in ((Mixed(), False), (MaskFirst(), True))
    ]
    assert [one.num_samples for one in found] == [8, 8]
    for site, row in found[0].scores.items():
        assert found[1].scores[site] == pytest.approx(row, rel=1e-4)


@pytest.mark.parametrize("method", ["gradient", "sqnr"])
def test_weights_that_an_algorithm_rounded_are_scored_as_the_float_model_has_them(method: Any) -> None:
    """Their rounding would cost nothing: the codes are on the grid."""
    qmodel = calibrated(CONFIG.replace("BIT: 8", "BIT: 3", 1))
    before = sensitivity(qmodel, batches(), method=method, weight_bits=(3, 4)).scores
    gptq(qmodel, batches())
    rounded = qmodel(batches()[0])
    after = sensitivity(qmodel, batches(), method=method, weight_bits=(3, 4)).scores
    assert after["strong.weight"][4] == pytest.approx(before["strong.weight"][4])
    assert after["strong.weight"][3] > after["strong.weight"][4] and after["head.input"] == before["head.input"]
    assert torch.equal(qmodel(batches()[0]), rounded)


def test_a_loaded_model_without_its_float_weights_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    qmodel = calibrated()
    gptq(qmodel, batches())
    qmodel.save(tmp_path / "rounded")
    sensitivity(QuantModel.load(tmp_path / "rounded", Net().eval()), batches())
    assert "rounding the changed weights again" in caplog.text
