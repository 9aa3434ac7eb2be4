"""Hadamard blocks: orthogonal, their own inverse, and equal in size."""

from __future__ import annotations

import pytest
import torch

from sparsebit.numerics.hadamard import is_power_of_two, rotate_blocks


@pytest.mark.parametrize("size", [1, 2, 8, 32])
def test_it_is_orthogonal_and_its_own_inverse(size: int) -> None:
    matrix = rotate_blocks(torch.eye(64, dtype=torch.float64), size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(64, dtype=torch.float64))
    torch.testing.assert_close(matrix, matrix.T)
    inside = matrix[:size, :size].abs()
    torch.testing.assert_close(inside, torch.full_like(inside, size**-0.5))
    assert float(matrix[:size, size:].abs().max() if size < 64 else 0) == 0


def test_two_by_two() -> None:
    found = rotate_blocks(torch.tensor([[1.0, 3.0], [2.0, 0.0]]), 2) * 2**0.5
    torch.testing.assert_close(found, torch.tensor([[4.0, -2.0], [2.0, 2.0]]))


def test_sizes_are_checked() -> None:
    assert [size for size in range(10) if is_power_of_two(size)] == [1, 2, 4, 8]
    with pytest.raises(AssertionError, match="blocks of 6"):
        rotate_blocks(torch.zeros(12), 6)
    with pytest.raises(AssertionError, match="blocks of 8 of 12"):
        rotate_blocks(torch.zeros(12), 8)
