from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparsebit.quantization.observers.magnitudes import ANYWHERE, BEFORE_SOFTMAX, GapRule, Magnitudes


def seen(*batches: Tensor) -> Magnitudes:
    found = Magnitudes()
    for batch in batches:
        found.update(batch)
    return found


BULK = torch.randn(1000, generator=torch.Generator().manual_seed(0)).clamp(-3.5, 3.5)


@pytest.mark.parametrize("number", [-1e4, 1e4, -65504.0, -1e9, torch.finfo(torch.float32).min])
def test_a_number_far_from_all_others_is_set_apart(number: float) -> None:
    apart = seen(torch.cat([BULK, torch.tensor([number])])).apart(ANYWHERE)
    assert apart is not None and apart.others == 4.0
    assert apart.smallest <= abs(number) < 2 * apart.smallest


@pytest.mark.parametrize("number", [100.0, 1000.0, 4000.0])
def test_outliers_of_thousands_are_data(number: float) -> None:
    assert seen(torch.cat([BULK, torch.tensor([number])])).apart(ANYWHERE) is None


def test_a_token_of_1000_times_the_others_is_data() -> None:
    assert seen(torch.cat([BULK, 1000 * BULK[:100]])).apart(ANYWHERE) is None


def test_a_continuous_tail_is_data_however_long_it_is() -> None:
    assert seen(torch.logspace(-3, 20, 200)).apart(ANYWHERE) is None


def test_smaller_numbers_count_in_front_of_a_softmax() -> None:
    found = seen(torch.cat([BULK, BULK - 100]))
    assert found.apart(ANYWHERE) is None and found.apart(BEFORE_SOFTMAX) is not None
    assert seen(100 * torch.rand(1000)).apart(BEFORE_SOFTMAX) is None


def test_what_no_grid_reaches_needs_no_gap() -> None:
    apart = seen(torch.tensor([0.0, -3e38])).apart(ANYWHERE)
    assert apart is not None and apart.others == 0.0
    assert seen(torch.tensor([0.0, -1e4])).apart(ANYWHERE) is None  # two values have a grid


def test_batches_and_ranks_add_up() -> None:
    quiet, hidden = seen(8 * BULK), seen(torch.tensor([1.0, -1e4]))
    apart = hidden.apart(ANYWHERE)
    assert apart is not None and apart.others == 2.0
    hidden.merge(quiet)
    apart = hidden.apart(ANYWHERE)
    assert apart is not None and apart.others == 32.0
    assert seen(50 * BULK, torch.tensor([-1e4])).apart(ANYWHERE) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_number_types(dtype: torch.dtype) -> None:
    apart = seen(torch.cat([BULK.to(dtype), torch.tensor([torch.finfo(dtype).min], dtype=dtype)])).apart(ANYWHERE)
    assert apart is not None and apart.others == 4.0


@pytest.mark.parametrize(
    "x", [torch.empty(0), torch.zeros(3), torch.tensor([1.0, math.nan]), torch.tensor([-math.inf])]
)
def test_nothing_to_see(x: Tensor) -> None:
    assert seen(x).apart(GapRule(0, 0)) is None
