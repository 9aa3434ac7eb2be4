"""Hints on common mistakes in a batch of images: its layout, its type or its range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

_CHANNELS = (1, 3, 4)
_BRIGHT = 16.0  # normalised pixels stay below, bytes are above


def input_hint(call: Any) -> str:
    """Advice for inputs that a model does not run on; empty if nothing is unusual."""
    return "".join(f"; {hint}" for hint in _hints(call))


def range_hint(call: Any) -> str:
    """Advice for inputs that look like images with pixels from 0 to 255; empty if none do."""
    for tensor in pytree.tree_leaves(call):
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and _is_image(tensor) and tensor.numel():
            low, high = float(tensor.min()), float(tensor.max())
            if low >= 0 and _BRIGHT < high <= 255:
                return (
                    f"pixels are from {low:g} to {high:g}: most models take 0 to 1, normalised as in training; divide "
                    "by 255, or give bytes (uint8) and --mean and --std"
                )
    return ""


def _hints(call: Any) -> Iterator[str]:
    leaves = pytree.tree_leaves(call)
    if any(type(leaf).__module__ == "numpy" and hasattr(leaf, "shape") for leaf in leaves):
        yield "it holds numpy arrays; give tensors: torch.from_numpy(array)"
    images = [leaf for leaf in leaves if isinstance(leaf, Tensor) and _is_image(leaf)]
    if any(not image.is_floating_point() for image in images):
        kinds = ", ".join(sorted({str(i.dtype).removeprefix("torch.") for i in images if not i.is_floating_point()}))
        yield f"images of {kinds} are bytes or counts; give floats as in training: images.float() / 255, normalised"
    if any(_is_channels_last(image) for image in images):
        yield "the images seem to have their channels last, (N, H, W, C); give (N, C, H, W): images.permute(0, 3, 1, 2)"


def _is_image(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and (tensor.shape[1] in _CHANNELS or _is_channels_last(tensor))


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.shape[-1] in _CHANNELS and tensor.shape[1] not in _CHANNELS
