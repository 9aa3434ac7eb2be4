"""Pixels -> tensors: an image file read, resized, cut and normalised; arrays of bytes normalised alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.cli.loading import LoadingError
from sparsebit.cli.options import Size
from sparsebit.errors import MissingExtraError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


def image_files(folder: Path) -> list[Path]:
    """The images of a folder and of the folders in it (classes), in the order of their paths."""
    files = sorted(
        file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
    )
    if not files:
        raise LoadingError(f"--data {folder}: no images in it or below it; known are {', '.join(sorted(SUFFIXES))}")
    return files


def read_image(file: Path, size: Size, *, resize: int | None = None, gray: bool = False) -> Tensor:
    """The centre of an image as bytes, (channels, *size).

    The image is first scaled so that its shorter side has `resize` pixels, or else so that it just covers `size`.
    """
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("pillow", "data", "reading an image folder") from None
    try:
        with Image.open(file) as opened:
            image = opened.convert("L" if gray else "RGB")
    except OSError as error:  # unknown format, cut off, ...
        raise LoadingError(f"--data: {file} cannot be read as an image ({error}); mend it or take it out") from None
    width, height = image.size
    scale = resize / min(width, height) if resize else max(size.height / height, size.width / width)
    scaled = round(width * scale), round(height * scale)
    if scaled[0] < size.width or scaled[1] < size.height:
        raise LoadingError(
            f"--resize {resize}: {file} becomes {scaled[1]}x{scaled[0]}, less than --size {size}; resize to more"
        )
    if scaled != image.size:
        image = image.resize(scaled, Image.Resampling.BILINEAR)
    left, top = (scaled[0] - size.width) // 2, (scaled[1] - size.height) // 2
    return _pixels(image.crop((left, top, left + size.width, top + size.height)))


def normalized(pixels: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> Tensor:
    """Bytes (N, C, H, W) -> (bytes / 255 - mean) / std as float32."""
    images = pixels.float().div_(255)
    for name, numbers in (("--mean", mean), ("--std", std)):
        if numbers is not None and len(numbers) not in (1, pixels.shape[1]):
            raise LoadingError(f"{name} has {len(numbers)} numbers, but the images have {pixels.shape[1]} channels")
    if mean is not None:
        images -= torch.tensor(mean).view(1, -1, 1, 1)
    if std is not None:
        images /= torch.tensor(std).view(1, -1, 1, 1)
    return images


def channels_first(pixels: Tensor, where: str) -> Tensor:
    """Bytes of images in any usual order, (N, H, W, C), (N, C, H, W) or (N, H, W), as (N, C, H, W)."""
    if pixels.dim() == 3:
        return pixels[:, None]
    if pixels.dim() == 4 and pixels.shape[-1] in (1, 3):
        return pixels.permute(0, 3, 1, 2)
    if pixels.dim() == 4 and pixels.shape[1] in (1, 3):
        return pixels
    raise LoadingError(
        f"{where}: bytes of shape {tuple(pixels.shape)} are no images; wanted are (N, H, W, C) with 1 or 3 channels, "
        "or floats of any shape"
    )


def _pixels(image: Any) -> Tensor:
    width, height = image.size
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, -1).permute(2, 0, 1)
