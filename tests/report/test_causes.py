from __future__ import annotations

from dataclasses import replace

import pytest

from sparsebit.report.causes import causes_of
from sparsebit.report.page_data import Bins, Layer, Tensor

POOR = Tensor("input", "uint8", 8, 1, 15.0, -1.0, 1.0, -1.0, 1.0, 0.0)
WEIGHT = replace(POOR, role="weight", format="int8")
PEAKS = (1.0, 1.0, 1.1, 20.0)


@pytest.mark.parametrize(
    ("tensor", "text", "remedy"),
    [
        (replace(POOR, clipped=0.02), "2.0% of the values of its input are outside", "wider range"),
        (replace(POOR, peaks=PEAKS), "Outlier channels", "smooth"),
        (replace(WEIGHT, peaks=PEAKS), "sets the only scale", "per-channel"),
        (replace(POOR, float_bins=Bins(0.0, 1.0, "3y" + "B" * 8)), "Few samples set the range", "percentile"),
        (replace(WEIGHT, bits=4), "has 4 bits", "gptq"),
        (replace(POOR, low=0.0, high=0.4), "use 20% of the range", "affine"),
    ],
    ids=["clipped", "outlier channels", "one channel", "few samples", "few bits", "one sided"],
)
def test_a_cause_and_what_to_try(tensor: Tensor, text: str, remedy: str) -> None:
    (cause,) = causes_of(Layer("a", tensors=(tensor,)))
    assert text in cause.text and remedy in cause.remedy


def test_none_for_good_or_unexplained_tensors() -> None:
    good = replace(POOR, sqnr_db=41.0, clipped=0.02, peaks=PEAKS)
    assert causes_of(Layer("a", tensors=(good, POOR, replace(POOR, sqnr_db=None, bits=2)))) == ()


def test_channels_with_their_own_scales_do_not_dominate() -> None:
    assert causes_of(Layer("a", tensors=(replace(WEIGHT, peaks=PEAKS, num_scales=4),))) == ()


def test_float_layers_say_why() -> None:
    (cause,) = causes_of(Layer("a", arithmetic="float", why_float="its weight is in float", remedy="quantize it"))
    assert cause.text == "It is computed in float: its weight is in float." and cause.remedy == "Quantize it."
    assert causes_of(Layer("a", arithmetic="integer", why_float="absorbed")) == ()


def test_a_sum_of_two_scales() -> None:
    small = Tensor("input.1", "uint8", 8, 1, 40.0, clip_low=-0.1, clip_high=0.1)
    large = replace(small, role="input.0", clip_low=-1.0, clip_high=1.0)
    (cause,) = causes_of(Layer("a", "add", tensors=(large, small)))
    assert "10 times" in cause.text and "equalize" in cause.remedy
    assert causes_of(Layer("a", "conv", tensors=(large, small))) == ()
