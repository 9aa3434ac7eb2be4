from __future__ import annotations

import pytest
import torch

from sparsebit.numerics.rounding.outlier_samples import level_weight, sample_levels, usual_level


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_levels_are_octaves_of_each_samples_root_mean_square(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 4.0, 4.5, 0.75])[:, None, None].expand(4, 3, 8).clone().to(dtype)
    x[1, :, ::2] = 0  # a root mean square of 4 / sqrt(2)
    assert sample_levels(x).tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize(
    ("num_samples", "num_large", "usual"),
    [(49, 1, 9), (50, 1, 0), (100, 2, 0), (100, 3, 9), (512, 3, 0), (0, 5, 9)],
    ids=str,
)
def test_at_most_a_fiftieth_of_the_samples_is_unusual(num_samples: int, num_large: int, usual: int) -> None:
    assert usual_level({0: num_samples - num_large if num_samples else 0, 9: num_large}) == usual


def test_the_square_of_a_far_larger_sample_weighs_less_the_larger_it_is() -> None:
    squares = {level: 4.0**level * level_weight(level, usual=3) for level in range(8)}
    assert [squares[level] for level in (0, 3, 4, 5, 7)] == [1, 4.0**3, 4.0**4, 4.0**3, 4.0]
