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


def with_views(split: Split, count: int) -> Split:
    """The split with `count` views of each piece, also held-out ones: earlier algorithms saw only the first view."""
    learned, held = (
        tuple(replace(piece, view=view) for view in range(count) for piece in pieces)
        for pieces in (split.learned, split.held)
    )
    return Split(learned, held)


def view_of(piece: Piece, inputs: Inputs, seed: int) -> Inputs:
    """The piece's part of the inputs of its batch, in its view."""
    own: Inputs = piece.of(inputs)
    if not piece.view:
        return own
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{piece.batch}/{piece.view}".encode()))
    viewed: Inputs = map_nested(Tensor, lambda t: image_view(t, generator) if is_images(t) else t, own)
    return viewed


def has_images(inputs: Inputs) -> bool:
    return any(is_images(tensor) for tensor in tensors_of(inputs))


def is_images(tensor: Tensor) -> bool:
    """Whether the tensor is a batch of images, (N, C, H, W), with at least 8 pixels in each direction."""
    return tensor.ndim == 4 and tensor.is_floating_point() and min(tensor.shape[-2:]) >= _SHIFT


def image_view(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image mirrored with a chance of one half, and shifted by up to an eighth of its size; zeros move in.

    `images`: (N, C, H, W).
    """
    height, width = images.shape[-2:]
    down, across = height // _SHIFT, width // _SHIFT
    is_mirrored = (torch.rand(len(images), generator=generator) < 0.5).tolist()
    tops = torch.randint(2 * down + 1, (len(images),), generator=generator).tolist()
    lefts = torch.randint(2 * across + 1, (len(images),), generator=generator).tolist()
    padded = F.pad(images, (across, across, down, down))
    found = []
    for image, top, left, mirrored in zip(padded, tops, lefts, is_mirrored, strict=True):
        cut = image[:, top : top + height, left : left + width]
        found.append(cut.flip(-1) if mirrored else cut)
    return torch.stack(found)
