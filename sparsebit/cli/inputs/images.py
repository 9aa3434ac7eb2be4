"""Images as tensors: files are read, resized, cropped and normalised; arrays of bytes are normalised.

Decoding is Pillow's. The special cases are files that Pillow reads wrongly or not at all: 16-bit pixels, which it clips
at 255, float pixels of unknown range, rotated TIFFs. Such a file is an error rather than a wrong image.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.cli.inputs.loading import LoadingError
from sparsebit.cli.options import Size
from sparsebit.errors import MissingExtraError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
# These are images too, but Pillow reads them only with a plugin or not at all.
_OTHER_SUFFIXES = frozenset({".avif", ".cr2", ".dng", ".heic", ".heif", ".jp2", ".jxl", ".nef", ".psd", ".svg"})
_MOST_PIXELS = 1 << 28  # limit for an image that is scaled up
_ORIENTATION = 0x0112  # a tag of EXIF and TIFF: above 4, rows and columns are exchanged
_TO_8_BITS = 255 / 65535  # 16 bits -> 8


class UnreadableImage(LoadingError):
    """One image that cannot be read; others may still be readable."""


def image_files(folder: Path) -> list[Path]:
    """The images of a folder and of the folders in it (classes, links to them too), in the order of their paths.

    Hidden files are left out. Formats that cannot be read cause a warning.
    """
    suffixes, others = _suffixes()
    found = sorted(_files(folder, set()))
    files = [file for file in found if file.suffix.lower() in suffixes]
    kinds = Counter(file.suffix.lower() for file in found if file.suffix.lower() in others)
    left_out = ", ".join(f"{count} x {suffix}" for suffix, count in kinds.most_common())
    if not files:
        raise LoadingError(
            f"--data {folder}: no images in it or below it; known endings: {', '.join(sorted(suffixes))}"
            + (f", not those in it ({left_out}): convert them" if kinds else "")
        )
    if kinds:
        warnings.warn(f"{folder}: images of other kinds are left out ({left_out}); convert them", stacklevel=2)
    return files


def read_image(file: Path, size: Size, *, resize: int | None = None, gray: bool = False) -> Tensor:
    """The centre of an image as bytes, (channels, *size), rotated as its EXIF says; the first frame of an animation.

    The image is first scaled so that its shorter side has `resize` pixels, or else so that it just covers `size`.
    """
    try:
        from PIL import Image, ImageOps
    except Exception:  # a broken package raises anything
        raise MissingExtraError("pillow", "data", "reading an image folder") from None
    try:
        with Image.open(file) as opened:
            image = ImageOps.exif_transpose(_eight_bits(_readable(opened))).convert("L" if gray else "RGB")
    except Exception as error:  # unknown format, cut off, a decompression bomb, ...: decoders raise all kinds
        raise UnreadableImage(f"{file}: {str(error) or type(error).__name__}") from None
    width, height = image.size
    scale = resize / min(width, height) if resize else max(size.height / height, size.width / width)
    scaled = round(width * scale), round(height * scale)
    if scaled[0] < size.width or scaled[1] < size.height:
        becomes = f"{file} becomes {scaled[1]}x{scaled[0]}, less than --size {size}"
        raise LoadingError(f"--resize {resize}: {becomes}; resize to more")
    if scale > 1 and scaled[0] * scaled[1] > _MOST_PIXELS:
        raise UnreadableImage(f"{file}: {height}x{width} would become {scaled[1]}x{scaled[0]}")
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
    fault = f"bytes of shape {tuple(pixels.shape)} are not images"
    raise LoadingError(f"{where}: {fault}; give (N, H, W, C) with 1 or 3 channels, or floats of any shape")


def _files(folder: Path, above: set[str]) -> Iterator[Path]:
    """All files below, through links to folders; a link to a folder above is not followed."""
    place = os.path.realpath(folder)
    if place in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _files(Path(entry.path), above | {place})
            else:
                yield Path(entry.path)


def _suffixes() -> tuple[frozenset[str], frozenset[str]]:
    """Suffixes of images that the installed Pillow reads, and of those that it does not."""
    try:
        from PIL import Image
    except ImportError:
        return SUFFIXES, _OTHER_SUFFIXES
    known = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    readable = _OTHER_SUFFIXES & known
    return SUFFIXES | readable, _OTHER_SUFFIXES - readable


def _readable(image: Any) -> Any:
    if image.format == "TIFF" and image.getexif().get(_ORIENTATION, 1) > 4:
        raise ValueError("a TIFF that lies on its side, which Pillow reads as noise; save it upright")
    return image


def _eight_bits(image: Any) -> Any:
    """Images of 16 bits scaled to 8 (Pillow's own conversion clips at 255); transparent palettes converted to RGBA."""
    if image.mode.startswith("I;16"):
        image = image.convert("I")  # the converted image has no `format`
    if image.mode == "I":
        low, high = image.getextrema()
        holds_bytes = image.format == "TIFF" and 0 < high < 256  # 32-bit pixels up to 255 may mean 8 bits or 16
        if low < 0 or high > 65535 or holds_bytes:
            raise ValueError("pixels of 32 bits, of unknown range; save it with 8 or 16 bits")
        return image.point(lambda value: value * _TO_8_BITS + 0.5).convert("L")
    if image.mode == "F":
        low, high = image.getextrema()
        if torch.frombuffer(bytearray(image.tobytes()), dtype=torch.float32).isnan().any():
            raise ValueError("pixels that are NaN")
        if low < 0 or high > 1:
            raise ValueError(f"float pixels from {low:g} to {high:g}, of unknown range; save it with 8 or 16 bits")
        return image.point(lambda value: value * 255 + 0.5).convert("L")
    return image.convert("RGBA") if image.mode == "P" and "transparency" in image.info else image


def _pixels(image: Any) -> Tensor:
    width, height = image.size
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, -1).permute(2, 0, 1)
