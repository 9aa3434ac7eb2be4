"""A budget of latency: the table by shares, and a search whose result is measured and corrected; the clock is a fake
one, but for one test that opens ONNX Runtime."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import BudgetError, ConfigError
from sparsebit.sparse import SparseModel
from sparsebit.sparse.budgets.latency_table import Clock, at_share, onnx_bytes
from tests.quantization.tiny import MaskFirst
from tests.sparse.fake_runtime import ByMultiplications, layer_sizes
from tests.sparse.nets import Transformer

pytest.importorskip("scipy")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


@pytest.fixture
def fake_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsebit.sparse.budgets.latency_table.onnx_bytes", layer_sizes)


def smodel_of(model: nn.Module, example: Tensor, **sparser: object) -> SparseModel:
    return SparseModel(model, {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", **sparser}}, example).eval()


def wide() -> nn.Module:
    torch.manual_seed(0)
    widths = (8, 64, 48, 64, 32, 8)
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*(part for layer in layers[:-1] for part in (layer, nn.ReLU())), layers[-1]).eval()


def test_times_are_linear_between_points() -> None:
    curve = ((0.25, 1.0), (0.5, 1.5), (1.0, 4.5))
    assert [at_share(curve, x) for x in (1.0, 0.75, 0.5, 0.3)] == pytest.approx([4.5, 3.0, 1.5, 1.1])
    assert at_share(curve, 0.0) == pytest.approx(0.5) and at_share((), 0.5) == 0.0
    assert at_share(((1.0, 3.0),), 0.5) == pytest.approx(1.5)  # one point: in proportion


@pytest.mark.usefixtures("fake_files")
@pytest.mark.parametrize("asked", [0.8, 0.6, 0.4])
def test_the_measured_time_is_what_was_asked(asked: float) -> None:
    smodel, watch = smodel_of(wide(), torch.randn(4, 8)), ByMultiplications(rest=100.0)
    found = smodel.choose_ratios({"latency": asked}, [torch.randn(16, 8)], stopwatch=watch)
    assert found.latency is not None and found.latency.is_near and not found.latency.reason
    assert found.latency.ratio == pytest.approx(asked, rel=0.05) and found.latency.tries == len(watch.seen)
    assert found.latency.predicted == pytest.approx(found.latency.ratio, rel=0.1)
    assert str(found).startswith("latency: ") and max(found.ratios.values()) > 0


@pytest.mark.usefixtures("fake_files")
def test_a_wrong_table_is_corrected_by_the_measurement() -> None:
    smodel, watch = smodel_of(wide(), torch.randn(4, 8)), ByMultiplications(wrong=1.3)
    found = smodel.choose_ratios({"latency": 0.6}, [torch.randn(16, 8)], stopwatch=watch)
    assert found.latency is not None and found.latency.tries > 1
    assert found.latency.ratio == pytest.approx(0.6, rel=0.05) and found.latency.predicted < 0.5


@pytest.mark.usefixtures("fake_files")
def test_what_cannot_be_reached_is_told(caplog: pytest.LogCaptureFixture) -> None:
    smodel = smodel_of(wide(), torch.randn(4, 8))
    with pytest.raises(BudgetError, match="latency"):
        smodel.choose_ratios({"latency": 0.01}, [torch.randn(16, 8)], stopwatch=ByMultiplications())
    found = smodel.choose_ratios({"latency": 0.2}, [torch.randn(16, 8)], stopwatch=ByMultiplications(wrong=5.0))
    assert found.latency is not None and "slower than asked; the nearest of" in found.latency.reason
    assert "budget latency=0.2" in caplog.text


@pytest.mark.usefixtures("fake_files")
def test_other_budgets_are_kept_beside_it() -> None:
    smodel = smodel_of(wide(), torch.randn(4, 8))
    found = smodel.choose_ratios(
        {"latency": 0.9, "macs": 0.5}, [torch.randn(16, 8)], stopwatch=ByMultiplications(), round_to=8
    )
    assert found.latency is not None and "faster than asked" in found.latency.reason
    smodel.calc_params()
    small = smodel.shrink(round_to=8)
    assert found.after.macs <= 0.5 * found.before.macs
    assert all(layer.out_features % 8 == 0 for layer in small.modules() if isinstance(layer, nn.Linear))


@pytest.mark.usefixtures("fake_files")
def test_heads_have_times_of_their_own() -> None:
    example = torch.randn(2, 5, 6)
    found = smodel_of(Transformer(), example).choose_ratios({"latency": 0.85}, [example], stopwatch=ByMultiplications())
    assert found.latency is not None and found.latency.ratio == pytest.approx(0.85, rel=0.1)


@pytest.mark.usefixtures("fake_files")
def test_shares_of_the_time_only() -> None:
    smodel = smodel_of(wide(), torch.randn(4, 8))
    with pytest.raises(ConfigError, match="latency=40: a share of the dense model's time"):
        smodel.choose_ratios({"latency": 40}, [torch.randn(16, 8)])


def test_nodes_are_named_after_modules() -> None:
    onnx = pytest.importorskip("onnx")
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 2))).eval()
    file = onnx.load_model_from_string(onnx_bytes(model, ((torch.randn(1, 4),), {})))
    assert {node.name.partition("/")[0] for node in file.graph.node} == {"0", "1.0", "1.1"}


@pytest.mark.slow
def test_in_onnx_runtime() -> None:
    model = nn.Sequential(nn.Conv2d(3, 48, 3), nn.ReLU(), nn.Conv2d(48, 48, 3)).eval()
    images = torch.randn(2, 3, 48, 48)
    found = smodel_of(model, images).choose_ratios({"latency": 0.7}, [images])
    assert found.latency is not None and found.latency.ratio > 0 and found.latency.predicted < 1
    assert found.latency.is_near or found.latency.reason


@pytest.mark.usefixtures("fake_files")
def test_the_clock_times_one_sample_whichever_argument_comes_first() -> None:
    call = (torch.eye(5), torch.randn(4, 5, 6)), {}
    clock = Clock(MaskFirst(), call, lambda units: pytest.fail("not asked for"), stopwatch=ByMultiplications())
    assert [tuple(tensor.shape) for tensor in clock.call[0]] == [(5, 5), (1, 5, 6)]
