"""`image_view`: mirrored and shifted copies of images, so that a training without labels has more data."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsebit.execution.held_out import Piece, Split
from sparsebit.graph.values.nested import map_nested, tensors_of

_SHIFT = 8  # at most one pixel of so many, in each direction
Inputs = dict[str, Any]


def with_views(split: Split, count: int, held: int | None = None) -> Split:
    """The split with `count` views of each piece, and `held` (the same number) of each held-out one.

    Earlier algorithms saw only the first view of held-out samples.
    """

    def viewed(pieces: tuple[Piece, ...], number: int) -> tuple[Piece, ...]:
        return tuple(replace(piece, view=view) for view in range(number) for piece in pieces)

    return Split(viewed(split.learned, count), viewed(split.held, count if held is None else held))


def view_of(piece: Piece, inputs: Inputs, seed: int) -> Inputs:
    """The piece's part of the inputs of its batch, in its view."""
    own: Inputs = piece.of(inputs)
    if not piece.view:
        return own
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{piece.batch}/{piece.view}".encode()))
    viewed: Inputs = map_nested(Tensor, lambda t: image_view(t, generator) if is_images(t) else t, own)
    return viewed


def has_images(inputs: Any) -> bool:
    """Whether the only tensor is a batch of images. Another one may be a mask or boxes, which do not move with them."""
    tensors = tensors_of(inputs)
    return len(tensors) == 1 and is_images(tensors[0])


def is_images(tensor: Tensor) -> bool:
    """Whether the tensor is a batch of images, (N, C, H, W), with at least 8 pixels in each direction."""
    return tensor.ndim == 4 and tensor.is_floating_point() and min(tensor.shape[-2:]) >= _SHIFT


def image_view(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image mirrored with a chance of one half, and shifted by up to an eighth of its size; zeros move in.

    `images`: (N, C, H, W).
    """
    count, _, height, width = images.shape
    down, across = height // _SHIFT, width // _SHIFT
    is_mirrored = torch.rand(count, 1, generator=generator) < 0.5
    rows = torch.randint(2 * down + 1, (count, 1), generator=generator) + torch.arange(height)
    columns = torch.randint(2 * across + 1, (count, 1), generator=generator) + torch.arange(width)
    columns = torch.where(is_mirrored, columns.flip(1), columns)
    numbers, rows, columns = (
        index.to(images.device) for index in (torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None])
    )
    return F.pad(images, (across, across, down, down))[numbers, :, rows, columns].movedim(-1, 1).contiguous()


def patched_images(images: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """This share of the images with a rectangle of another image in its place (CutMix, Yun et al., 2019, section 3.1).

    The rectangle's share of the area is uniform between 0 and 1. `images`: (N, C, H, W).
    """
    count, _, height, width = images.shape
    is_patched = torch.rand(count, 1, generator=generator) < share
    side = torch.rand(count, 1, generator=generator).sqrt()

    def is_inside(size: int) -> Tensor:
        middle = torch.rand(count, 1, generator=generator) * size
        return (torch.arange(size) + 0.5 - middle).abs() < side * size / 2

    inside = (is_inside(height) & is_patched)[:, None, :, None] & is_inside(width)[:, None, None, :]
    others = images[torch.randperm(count, generator=generator).to(images.device)]
    return torch.where(inside.to(images.device), others, images)
