"""Takes the screenshots of `sparsebit report` in the README and in its guide, from a real search, with a real browser.

`python scripts/screenshots.py` searches for a fast file of a MobileNetV2 on CIFAR-10, which takes about a quarter of an
hour, and writes docs/assets/report-*.png. `--run DIR` keeps the run, or shows one that is there. Without the data
folder (SPARSEBIT_DATA, else ../shared/data) a small network on handwritten digits is taken.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sparsebit
from sparsebit.report import read_run, write_page

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "docs" / "assets"
LAYER = "features.12.body.0.0"  # whose details are shown
MOST_BYTES = 300_000
NAMES = ("report-light.png", "report-dark.png")
Subject = tuple[nn.Module, list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--run", type=Path, help="the folder of the search; one that is finished is shown as it is")
    parser.add_argument("--minutes", type=float, default=15.0, help="how long to search")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = given.run or Path(folder) / "MobileNetV2"
        if not (run / "record.json").exists():
            search(run, given.minutes)
        page = write_page(Path(folder) / "page.html", [read_run(run)])
        take(page)


def search(run: Path, minutes: float) -> None:
    """Look for the fastest file that loses at most 0.3 points."""
    torch.set_num_threads(1)
    data = Path(os.environ.get("SPARSEBIT_DATA") or ROOT.parent / "shared" / "data") / "cifar10"
    model, batches, labelled = cifar10(data) if data.is_dir() else digits()
    result = sparsebit.compress(
        model, batches, metric="top1", validation=labelled, max_loss=0.3, minutes=minutes, folder=run
    )
    print(result)


def cifar10(data: Path) -> Subject:
    """The trained MobileNetV2, 256 training images, and all test images with labels."""
    import numpy

    sys.path.insert(0, str(data / "models"))
    models: Any = importlib.import_module("cifar_models")
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (models.MEAN, models.STD))

    def read(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        found = numpy.load(data / name)
        images = torch.from_numpy(found["images"]).permute(0, 3, 1, 2).float() / 255
        return (images - mean) / std, torch.from_numpy(found["labels"]).long()

    images, labels = read("test_5k.npz")
    labelled = list(zip(images.split(50), labels.split(50), strict=True))
    return models.load("mobilenetv2"), list(read("train_10k.npz")[0][:256].split(32)), labelled


def digits() -> Subject:
    """The network of `sparsebit demo`, trained, and its images."""
    from sparsebit.cli.digits import load_digits, train

    data = load_digits()
    labelled = list(zip(data.test_images.split(50), data.test_labels.split(50), strict=True))
    return train(data, epochs=15, seed=0), list(data.train_images[:256].split(32)), labelled


def take(page: Path) -> None:
    """Write the pictures; one that is larger than allowed is an error."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        wide, high = {"width": 1280, "height": 860}, {"width": 1280, "height": 1215}
        top = browser.new_page(viewport=high)
        top.goto(page.as_uri())
        top.wait_for_timeout(500)
        top.screenshot(path=ASSETS / NAMES[0])
        dark = browser.new_page(viewport=wide, color_scheme="dark")
        dark.goto(f"{page.as_uri()}#layer={LAYER}")
        dark.wait_for_timeout(500)
        dark.get_by_role("group", name="Colour by").get_by_text("Time").click()
        dark.get_by_label("Show all").click()
        dark.wait_for_timeout(300)
        dark.locator("#graph").screenshot(path=ASSETS / NAMES[1])
        browser.close()
    for name in NAMES:
        size = (ASSETS / name).stat().st_size
        print(f"{name}: {size:,} bytes")
        if size > MOST_BYTES:
            raise SystemExit(f"{name} has {size:,} bytes; at most {MOST_BYTES:,} are allowed: make it smaller")


if __name__ == "__main__":
    main()
