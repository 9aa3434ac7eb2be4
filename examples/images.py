"""Classifiers by name, folders of labelled images, and how a quantized classifier does on them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from common import Scores, existing, sqnr_db
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

Transform = Callable[[Image.Image], torch.Tensor]
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pretrained", action="store_true", help="download the library's weights")
    parser.add_argument("--weights", type=Path, metavar="FILE", help=".safetensors, or .pt with a state_dict")
    parser.add_argument("--images", type=Path, metavar="DIR", help="class sub-folders, or names such as 0042_cat.jpg")
    parser.add_argument("--batch-size", type=int, default=16)


def load_classifier(name: str, *, pretrained: bool, weights: Path | None) -> tuple[nn.Module, Transform]:
    """A model of timm, or of torchvision (`torchvision/resnet18`), and the preprocessing that goes with it."""
    torch.manual_seed(0)  # weights that stay random are at least the same ones every time
    library, _, short = name.rpartition("/")
    if library == "torchvision":
        from torchvision.models import get_model, get_model_weights

        default = get_model_weights(short).DEFAULT
        model, transform = get_model(short, weights=default if pretrained else None), default.transforms()
    else:
        import timm

        model = timm.create_model(name, pretrained=pretrained)
        transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    if weights is not None:
        model.load_state_dict(_read(weights))
    return model.eval(), transform


def _read(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True)


class LabelledImages(Dataset[tuple[torch.Tensor, int]]):
    """Images in class sub-folders (their order numbers the classes) or with the class index in front of their names."""

    def __init__(self, folder: Path, transform: Transform) -> None:
        files = sorted(file for file in existing(folder).rglob("*") if file.suffix.lower() in SUFFIXES)
        classes = {name: index for index, name in enumerate(sorted({file.parent.name for file in files}))}
        flat = all(file.parent == folder for file in files)
        self.items = [(file, int(file.name.split("_")[0]) if flat else classes[file.parent.name]) for file in files]
        self.transform = transform
        if not files:
            sys.exit(f"no images in {folder}; wanted: class sub-folders, or names such as 0042_cat.jpg")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file, label = self.items[index]
        return self.transform(Image.open(file).convert("RGB")), label


def split(dataset: LabelledImages, limit: int | None, batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """(for calibration, for the score): every eighth image, 128 at most, calibrates and is scored by nobody."""
    chosen = range(len(dataset))[: limit and limit * 8 // 7]
    held = chosen[::8][:128]
    rest = sorted(set(chosen) - set(held))[:limit]
    return DataLoader(Subset(dataset, held), batch_size), DataLoader(Subset(dataset, rest), batch_size)


@torch.no_grad()
def compare(model: nn.Module, qmodel: nn.Module, batches: Iterable[Any], device: str) -> Scores:
    """Top-1 of both, how often they agree, and the SQNR of the outputs, in one pass over the images."""
    model.to(device)
    triples = [(model(x.to(device)).cpu(), qmodel(x.to(device)).cpu(), labels) for x, labels in batches]
    original, quantized, labels = (torch.cat(parts) for parts in zip(*triples, strict=True))

    def percent(outputs: torch.Tensor, wanted: torch.Tensor) -> float:
        return 100 * float((outputs.argmax(1) == wanted).float().mean())

    return {
        "top-1 %": (percent(original, labels), percent(quantized, labels)),
        "same answer as float %": (None, percent(quantized, original.argmax(1))),
        "output SQNR dB": (None, sqnr_db(quantized, original)),
    }
