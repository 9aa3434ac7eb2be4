from __future__ import annotations

import pytest
import torch

from sparsebit.quantization.algorithms.rescaling.equalization_math import absorbed_bias, equalizing_scale, precision


def test_ranges_meet_in_the_middle():
    made, read = torch.tensor([1.0, 4.0, 16.0]), torch.tensor([16.0, 4.0, 1.0])
    scale = equalizing_scale(made, read)
    assert torch.allclose(made / scale, read * scale)
    assert precision(made / scale, read * scale) == pytest.approx(1.0)
    assert precision(made, read) < 0.15


def test_both_ranges_stay_where_one_channel_is_largest_on_both_sides():
    made, read = torch.tensor([8.0, 1.0]), torch.tensor([2.0, 1.0])
    scale = equalizing_scale(made, read)
    assert float((made / scale).max()) == pytest.approx(8.0) and float((read * scale).max()) == pytest.approx(2.0)


def test_a_channel_without_weights_keeps_its_scale():
    assert equalizing_scale(torch.tensor([0.0, 4.0]), torch.tensor([1.0, 1.0]))[0] == 1
    assert equalizing_scale(torch.zeros(2), torch.ones(2)).tolist() == [1, 1]
    assert precision(torch.zeros(2), torch.ones(2)) == 1


def test_only_what_is_always_there_is_absorbed():
    assert absorbed_bias(torch.tensor([-1.0, 0.0, 2.0])).tolist() == [0, 0, 2]
