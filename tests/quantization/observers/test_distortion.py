from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsebit.numerics.qparams import qparams_from_range
from sparsebit.numerics.reference import fake_quantize
from sparsebit.numerics.spec import PerChannel, TensorSpec
from sparsebit.quantization.observers import distortion as distortion_module
from sparsebit.quantization.observers.distortion import HistogramDistortion, SampleDistortion
from tests.quantization.observers.histograms import histogram_of


def data(kind: str, num_rows: int = 1, n: int = 40_000) -> Tensor:
    rows = torch.randn(num_rows, n, generator=torch.Generator().manual_seed(0))
    return {"gauss": rows, "relu": rows.relu(), "negative": -rows.abs(), "heavy": rows**3 + 0.3}[kind]


def candidates(rows: Tensor) -> tuple[Tensor, Tensor]:
    low, high = rows.amin(1, keepdim=True).clamp(max=0), rows.amax(1, keepdim=True).clamp(min=0)
    return low * torch.tensor([[1.0, 0.7, 0.4, 0.1]]), high * torch.tensor([[1.0, 0.9, 0.3, 0.2]])


def truth(rows: Tensor, low: Tensor, high: Tensor, spec: TensorSpec) -> Tensor:
    spec = spec.replace(granularity=PerChannel(0))
    errors = []
    for column in range(low.shape[1]):
        quantized = fake_quantize(rows, *qparams_from_range(low[:, column], high[:, column], spec), spec)
        errors.append((quantized.double() - rows).square().sum(1))
    return torch.stack(errors, 1)


@pytest.mark.parametrize("kind", ["gauss", "relu", "negative", "heavy"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 10, 12])
def test_both_agree_with_the_reference(kind: str, symmetric: bool, bits: int) -> None:
    rows, spec = data(kind), TensorSpec(bits, symmetric)
    low, high = candidates(rows)
    expected = truth(rows, low, high, spec)
    torch.testing.assert_close(SampleDistortion(rows, spec)(low, high), expected, rtol=1e-3, atol=0)
    tolerance = 0.05 if bits <= 8 else 0.2
    by_histogram = HistogramDistortion(histogram_of(rows), spec)(low, high)
    torch.testing.assert_close(by_histogram, expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("bits", [3, 9])
def test_rows_are_independent_of_each_other_and_of_the_portions(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, spec = data("heavy", num_rows=5, n=300) * 2.0 ** torch.arange(5)[:, None], TensorSpec(bits, False)
    low, high = candidates(rows)
    whole = SampleDistortion(rows, spec)(low, high), HistogramDistortion(histogram_of(rows), spec)(low, high)
    monkeypatch.setattr(distortion_module, "CELLS", 1)
    torch.testing.assert_close(SampleDistortion(rows, spec)(low, high), whole[0])
    torch.testing.assert_close(HistogramDistortion(histogram_of(rows), spec)(low, high), whole[1])
    alone = SampleDistortion(rows[3:4], spec)(low[3:4], high[3:4])
    torch.testing.assert_close(alone, whole[0][3:4])


def test_zeros_never_err() -> None:
    spec, rows = TensorSpec(2, False), torch.tensor([[0.0] * 100 + [1.0, 3.0]])
    error = HistogramDistortion(histogram_of(rows), spec)(torch.zeros(1, 1), torch.full((1, 1), 3.0))
    assert float(error) < 1e-5


def test_mean_share_adds_the_squared_sum_of_errors() -> None:
    rows, spec = torch.tensor([[0.2, 1.0, 0.2, 3.0]]), TensorSpec(2, False)
    low, high = torch.zeros(1, 1), torch.full((1, 1), 3.0)
    assert float(SampleDistortion(rows, spec)(low, high)) == pytest.approx(2 * 0.2**2)
    assert float(SampleDistortion(rows, spec, mean_share=0.5)(low, high)) == pytest.approx(2 * 0.2**2 + 0.5 * 0.4**2)
