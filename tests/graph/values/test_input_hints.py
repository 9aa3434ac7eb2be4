"""Hints for batches of images in another layout, type or range than models take."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from sparsebit.graph.values.input_hints import input_hint, range_hint

IMAGES = torch.rand(2, 3, 8, 8)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (IMAGES.permute(0, 2, 3, 1), "channels last"),
        ({"x": IMAGES[:, :1].permute(0, 2, 3, 1)}, "channels last"),
        ((IMAGES * 255).byte(), "images of uint8"),
        ((IMAGES * 255).long(), "images of int64"),
        (IMAGES.numpy(), "torch.from_numpy"),
        ((IMAGES.numpy(), numpy.zeros(2)), "torch.from_numpy"),
        ([{"x": IMAGES.numpy()}], "torch.from_numpy"),
    ],
)
def test_hints(batch: Any, words: str) -> None:
    assert words in input_hint(batch)


@pytest.mark.parametrize("batch", [IMAGES, torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 64, 7, 7), None, "text"])
def test_nothing_unusual(batch: Any) -> None:
    assert input_hint(batch) == "" and range_hint(batch) == ""


def test_both_layout_and_type() -> None:
    assert input_hint((IMAGES * 255).byte().permute(0, 2, 3, 1)).count("; give") == 2


@pytest.mark.parametrize("images", [IMAGES * 255, IMAGES.permute(0, 2, 3, 1) * 200, (IMAGES * 255).half()])
def test_pixels_up_to_255(images: torch.Tensor) -> None:
    assert "divide by 255" in range_hint(((images,), {}))


@pytest.mark.parametrize(
    "images", [IMAGES * 4 - 2, (IMAGES - 0.5) * 255, IMAGES * 1e4, IMAGES * float("nan"), IMAGES[:0]]
)
def test_other_ranges(images: torch.Tensor) -> None:
    assert range_hint(images) == ""
