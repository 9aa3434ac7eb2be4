from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsebit.numerics.spec import PerChannel, PerTensor, TensorSpec
from sparsebit.quantization.inspecting.site_errors import SAMPLE, GrowingHistogram, SiteErrors, _sampled
from sparsebit.quantization.quantizers.base import Quantizer

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def quantizer(low: Tensor, high: Tensor, spec: TensorSpec | None = None) -> Quantizer:
    spec = spec or TensorSpec(8, False, PerTensor())
    made = Quantizer(spec, "activation", name="fc.input", num_scales=low.numel())
    made.calc_qparams_with_minmax(low, high)
    return made


def test_the_error_of_one_quantizer() -> None:
    x = torch.linspace(-1, 3, 1001)
    made = quantizer(torch.tensor(-1.0), torch.tensor(1.0))
    errors = SiteErrors(made, histogram=True)
    errors.add(x)
    found = errors.result()
    made.use_quant = True
    expected = made(x)
    noise = float((expected - x).square().mean())
    assert found.site == "fc.input" and found.format == "uint8" and found.target == "activation"
    assert found.mse == pytest.approx(noise)
    assert found.sqnr_db == pytest.approx(10 * math.log10(float(x.square().mean()) / noise))
    assert (found.low, found.high) == (-1.0, 3.0)
    assert (found.clip_low, found.clip_high) == (float(expected.min()), float(expected.max()))
    assert found.clipped == pytest.approx(0.5, abs=0.01)
    assert found.histogram is not None and sum(found.histogram.counts) == 1001


def test_what_is_only_rounded_is_not_clipped() -> None:
    x = torch.randn(500)
    errors = SiteErrors(quantizer(x.min(), x.max()), histogram=False)
    errors.add(x)
    assert errors.result().clipped == 0 and errors.result().histogram is None


def test_every_channel_has_its_own_range() -> None:
    x = torch.tensor([[-1.0, 0.5, 1.0], [-100.0, 50.0, 100.0]])
    spec = TensorSpec(8, True, PerChannel(0))
    errors = SiteErrors(quantizer(torch.tensor([-0.5, -100.0]), torch.tensor([0.5, 100.0]), spec), histogram=False)
    errors.add(x)
    found = errors.result()
    assert found.num_scales == 2 and found.clipped == pytest.approx(2 / 6)
    assert found.clip_low == pytest.approx(-100.8, abs=1) and found.clip_high == pytest.approx(100, abs=1)


def test_the_switch_is_as_before() -> None:
    made = quantizer(torch.tensor(-1.0), torch.tensor(1.0))
    errors = SiteErrors(made, histogram=True)
    for on in (False, True):
        made.use_quant = on
        errors.add(torch.randn(8))
        assert made.use_quant is on


def test_what_is_no_number_does_not_spoil_the_histogram() -> None:
    errors = SiteErrors(quantizer(torch.tensor(-1.0), torch.tensor(1.0)), histogram=True)
    errors.add(torch.tensor([0.0, 1.0, math.inf, -math.inf, math.nan]))
    found = errors.result()
    assert found.histogram is not None and sum(found.histogram.counts) == 2 and (found.low, found.high) == (0, 1)
    assert not math.isfinite(found.mse)


@pytest.mark.parametrize("x", [torch.zeros(0), torch.arange(3), torch.eye(2).to_sparse()], ids=["empty", "int", "coo"])
def test_what_is_not_quantized_is_not_counted(x: Tensor) -> None:
    errors = SiteErrors(quantizer(torch.tensor(-1.0), torch.tensor(1.0)), histogram=True)
    errors.add(x)
    assert errors.count == 0


@settings(max_examples=200, deadline=None)
@given(batches=st.lists(st.lists(FLOATS, min_size=1, max_size=8), min_size=1, max_size=4), data=st.data())
def test_histogram_depends_on_the_values_alone(batches: list[list[float]], data: st.DataObject) -> None:
    values = [value for batch in batches for value in batch]
    whole, parts, shuffled = GrowingHistogram(), GrowingHistogram(), GrowingHistogram()
    whole.add(torch.tensor(values))
    for batch in batches:
        parts.add(torch.tensor(batch))
    for value in data.draw(st.permutations(values)):
        shuffled.add(torch.tensor([value]))
    found = whole.result()
    assert found is not None and found == parts.result() == shuffled.result()
    assert len(found.counts) <= 64 and sum(found.counts) == len(values)
    assert found.counts[0] and found.counts[-1]
    assert found.low <= min(values) and max(values) <= found.high


def test_histogram_by_hand() -> None:
    histogram = GrowingHistogram()
    assert histogram.result() is None
    histogram.add(torch.arange(-64.0, 64.0))
    found = histogram.result()
    assert found is not None and (found.low, found.width, found.high) == (-64, 2, 64) and set(found.counts) == {2}


@pytest.mark.parametrize("shape", [(3, 64, 1024), (SAMPLE * 4,), (SAMPLE,), (5,)], ids=str)
def test_the_sample_sees_every_channel(shape: tuple[int, ...]) -> None:
    channels = torch.arange(shape[-1]).expand(shape)
    found = _sampled(channels)
    assert found.numel() <= SAMPLE
    if len(shape) > 1:
        assert found.unique().numel() == shape[-1]
    if channels.numel() <= SAMPLE:
        assert torch.equal(found, channels.reshape(-1))


def test_quantized_values_scales_and_peaks_of_channels() -> None:
    x = torch.tensor([[-1.0, 0.5, 0.25], [-100.0, 50.0, 100.0]])
    spec = TensorSpec(8, True, PerChannel(0))
    made = quantizer(torch.tensor([-1.0, -100.0]), torch.tensor([1.0, 100.0]), spec)
    errors = SiteErrors(made, histogram=True)
    for scaled in (x, 2 * x):
        errors.add(scaled)
    found = errors.result()
    assert found.quantized is not None and sum(found.quantized.counts) == 12
    assert found.quantized.high <= 130  # clipped, unlike the float values
    assert found.scales == pytest.approx(sorted(found.scales)) and len(found.scales) == 2
    assert found.peaks == (100.0, 200.0, 200.0)  # of the columns: the last axis of an activation


def test_channels_of_weights_and_of_images() -> None:
    images = torch.zeros(2, 3, 4, 4)
    images[:, 1], images[:, 2] = 1.0, -2.0
    one = SiteErrors(quantizer(torch.tensor(-2.0), torch.tensor(2.0)), histogram=False)
    one.add(images)
    assert one.result().peaks == (0.0, 1.0, 2.0)
    one.add(images[:, :2])  # another number of channels: none are common
    assert one.result().peaks == ()


def test_many_channels_in_short() -> None:
    errors = SiteErrors(quantizer(torch.tensor(-1.0), torch.tensor(1.0)), histogram=False)
    errors.add(torch.arange(1000.0)[None])
    peaks = errors.result().peaks
    assert len(peaks) == 64 and (peaks[0], peaks[-1]) == (0.0, 999.0) and list(peaks) == sorted(peaks)
