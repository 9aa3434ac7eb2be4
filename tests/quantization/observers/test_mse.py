from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsebit.numerics.qparams import qparams_from_range
from sparsebit.numerics.reference import fake_quantize
from sparsebit.numerics.spec import PerChannel, PerGroup, TensorSpec
from sparsebit.quantization.observers import build_observer
from sparsebit.quantization.observers.distortion import MEAN_SHARE, SampleDistortion
from sparsebit.quantization.observers.mse import mse_range
from sparsebit.quantization.observers.statistics import extremes


def error(x: Tensor, ends: tuple[Tensor, Tensor], spec: TensorSpec) -> Tensor:
    return (fake_quantize(x, *qparams_from_range(*ends, spec), spec) - x).double().square().sum()


def observed(x: Tensor, spec: TensorSpec, target: str) -> tuple[Tensor, Tensor]:
    observer = build_observer("mse", spec, target=target)  # type: ignore[arg-type]
    observer.update(x)
    return observer.calc_range()


DATA = {
    "gauss": lambda: torch.randn(20_000),
    "relu": lambda: torch.randn(20_000).relu(),
    "negative": lambda: -torch.rand(20_000),
    "skewed": lambda: torch.nn.functional.gelu(3 * torch.randn(20_000)),
    "outlier": lambda: torch.cat([torch.randn(20_000), torch.tensor([60.0])]),
}


@pytest.mark.sample(21)
@pytest.mark.parametrize("target", ["weight", "activation"])
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_nearly_the_best_of_all_ranges(bits: int, symmetric: bool, kind: str, target: str) -> None:
    x, spec = DATA[kind](), TensorSpec(bits, symmetric)
    found = error(x, observed(x, spec, target), spec)
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    fractions = [0.02 * step for step in range(1, 51)]
    both = [(low * fraction, high * fraction) for fraction in fractions]
    one = [(low, high * fraction) for fraction in fractions] + [(low * fraction, high) for fraction in fractions]
    best = min(float(error(x, ends, spec)) for ends in both + one)
    assert float(found) <= best * 1.01 + 1e-9


@pytest.mark.parametrize("target", ["weight", "activation"])
def test_never_worse_than_minmax_in_any_row(target: str) -> None:
    x, spec = torch.randn(64, 30) ** 3, TensorSpec(4, True, PerChannel(0))
    distortion = SampleDistortion(x, spec, MEAN_SHARE if target == "weight" else 0)
    found, minmax = (distortion(low[:, None], high[:, None]) for low, high in (observed(x, spec, target), extremes(x)))
    assert (found <= minmax * 1.001).all()


def test_outputs_of_weights_behind_a_relu_err_less_than_by_least_squares() -> None:
    weight, inputs = torch.randn(64, 200), torch.randn(500, 200).relu()
    spec = TensorSpec(4, True, PerChannel(0))
    least_squares = mse_range(*extremes(weight), spec, SampleDistortion(weight, spec))
    errors = [
        (inputs @ (fake_quantize(weight, *qparams_from_range(*ends, spec), spec) - weight).T).square().mean()
        for ends in (observed(weight, spec, "weight"), least_squares)
    ]
    assert errors[0] < 0.9 * errors[1]


def test_rows_do_not_depend_on_their_neighbours() -> None:
    x, spec = torch.randn(6, 50) * 2.0 ** torch.arange(6)[:, None], TensorSpec(4, False, PerChannel(0))
    together = observed(x, spec, "weight")
    for index in range(len(x)):
        alone = observed(x[index : index + 1], spec, "weight")
        torch.testing.assert_close(torch.cat(alone), torch.stack([end[index] for end in together]))


def test_range_scales_with_the_data() -> None:
    x, spec = torch.randn(5000), TensorSpec(4, True)
    for target in ("weight", "activation"):
        small, large = observed(x, spec, target), observed(x * 1024, spec, target)
        torch.testing.assert_close(large[1], small[1] * 1024)


def test_long_weights_go_by_their_histogram_and_groups_by_their_values() -> None:
    x = torch.randn(4, 1 << 17)
    low, high = observed(x, TensorSpec(8, True), "weight")
    assert low.shape == high.shape == ()
    assert 3.5 < float(high) < 4.6
    low, high = observed(x[:, :1000], TensorSpec(4, False, PerGroup(1, 128)), "weight")
    assert low.shape == high.shape == (4 * 8,)


def test_zeros_only() -> None:
    for target in ("weight", "activation"):
        assert [end.tolist() for end in observed(torch.zeros(3, 4), TensorSpec(4, True), target)] in ([0, 0], [-8, 7])
