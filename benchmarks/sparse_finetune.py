"""CIFAR-10 models with half of their MACs, fine-tuned: Sparsebit and Torch-Pruning, equal epochs in one run.

    python benchmarks/sparse.py finetune [--models resnet20,mobilenetv2] [--epochs 100] [--train FILE.npz] [--json FILE]
    python benchmarks/sparse.py finetune --device cpu --epochs 1 --limit 256 --images 500     # does it run at all?

Every tool's model is trained alike, by the recipe of the model below: the dense model as teacher beside the labels, SGD
with a short rise and a cosine fall of the learning rate, images shifted and mirrored; on a GPU a step is a CUDA graph
in bfloat16. `--train`: an archive with `images` (uint8, NHWC) and `labels`; by default `cifar10/train.npz` of the data
folder (all 50,000) or, where that is missing, `train_10k.npz`. A recipe has a number of steps, so that fewer images are
seen more often; `--epochs` sets how often.
Torch-Pruning (from PYTHONPATH) prunes by L2, with one ratio for every layer and with a global threshold; a model that
it cannot prune is a row that says why. `goal`: at least float - 1.0.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import data_folder, emit
from models import Task, _module, cifar
from torch import Tensor, nn


@dataclass(frozen=True)
class Recipe:
    """How a model is trained unless the command line says otherwise."""

    steps: int
    lr: float
    weight_decay: float
    batch: int = 128
    temperature: float = 4.0
    alpha: float = 0.9  # the weight of the teacher; the labels have the rest


RECIPES = {
    "resnet20": Recipe(steps=39_000, lr=0.1, weight_decay=1e-4),  # 100 epochs of 50,000 images
    "mobilenetv2": Recipe(steps=11_700, lr=0.05, weight_decay=4e-4),  # 30
}


class TrainingImages:
    """All images on the device as bytes; batches are shifted by up to four pixels, mirrored and normalised there."""

    def __init__(self, file: Path, name: str, limit: int | None, device: str) -> None:
        models = _module(data_folder() / "cifar10" / "models" / "cifar_models.py")
        named = (models.RESNET20_MEAN, models.RESNET20_STD) if name == "resnet20" else (models.MEAN, models.STD)
        archive = np.load(file)
        self.images = F.pad(torch.from_numpy(archive["images"][:limit]).permute(0, 3, 1, 2), (4, 4, 4, 4)).to(device)
        self.labels = torch.from_numpy(archive["labels"][:limit].astype(np.int64)).to(device)
        self.mean, self.std = (torch.tensor(values, device=device).view(3, 1, 1) * 255 for values in named)
        self.device = device

    def batches(self, size: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """So many batches; every image is seen once before one is seen again."""
        done = 0
        while done < count:
            order = torch.randperm(len(self.labels), device=self.device)
            for chosen in order[: len(order) // size * size].split(size)[: count - done]:
                yield self._augmented(chosen), self.labels[chosen]
                done += 1

    def _augmented(self, chosen: Tensor) -> Tensor:
        top, left = torch.randint(0, 9, (2, len(chosen), 1), device=self.device)
        span = torch.arange(32, device=self.device)
        rows, columns = (top + span)[:, None, :, None], (left + span)[:, None, None, :]
        columns = torch.where(torch.rand(len(chosen), 1, 1, 1, device=self.device) < 0.5, columns.flip(3), columns)
        channels = torch.arange(3, device=self.device)[None, :, None, None]
        crops = self.images[chosen[:, None, None, None], channels, rows, columns]
        return (crops.float() - self.mean) / self.std


def train(model: nn.Module, teacher: nn.Module, images: TrainingImages, recipe: Recipe) -> None:
    """Labels and the dense model's answers; the learning rate rises over 2 % of the steps and falls as a cosine."""
    from sparsebit.quantization import CudaGraphStep, DistillationLoss

    is_gpu = images.device == "cuda"
    weights = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]  # biases, scales of norms: no weight decay
    optimizer = torch.optim.SGD(
        [{"params": weights, "weight_decay": recipe.weight_decay}, {"params": vectors}],
        lr=recipe.lr,
        momentum=0.9,
        nesterov=True,
        fused=is_gpu,
    )
    rise = max(1, recipe.steps // 50)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / rise) * (1 + math.cos(math.pi * step / recipe.steps)) / 2
    )
    loss = DistillationLoss(teacher, temperature=recipe.temperature, alpha=recipe.alpha)
    if is_gpu:
        model.to(memory_format=torch.channels_last)
        teacher.to(memory_format=torch.channels_last)
    half = torch.bfloat16 if is_gpu else None
    step = CudaGraphStep(model.train(), lambda net, x, y: loss(net(x), x, y), half=half)
    for inputs, labels in images.batches(recipe.batch, recipe.steps):
        step(inputs, labels)
        optimizer.step()
        schedule.step()
    model.eval()


# --- the tools: each gives the smaller model


def sparsebit(task: Task, macs: float) -> nn.Module:
    """Ratios by the integer program, then reconstruction on the calibration images."""
    from sparsebit.sparse import SparseModel

    sparser = {"TYPE": "structured", "STRATEGY": "l1norm"}
    smodel = SparseModel(task.model, {"DEVICE": "cpu", "SPARSER": sparser}, task.calibration[0][:2]).eval()
    smodel.choose_ratios({"macs": macs}, task.calibration[:1])
    smodel.calc_params()
    smodel.reconstruct(task.calibration)
    return smodel.shrink()


def torch_pruning(task: Task, macs: float, *, is_global: bool) -> nn.Module:
    """The smallest ratio, in steps of 1 %, that leaves at most this share of the MACs."""
    import torch_pruning as tp

    example = task.calibration[0][:2]
    dense = macs_of(task.model, example)

    def pruned(percent: int) -> nn.Module:
        model = copy.deepcopy(task.model)
        heads = [m for m in model.modules() if isinstance(m, nn.Linear)][-1:]
        tp.pruner.MagnitudePruner(
            model,
            example,
            importance=tp.importance.MagnitudeImportance(p=2),
            pruning_ratio=percent / 100,
            max_pruning_ratio=0.9,
            global_pruning=is_global,
            ignored_layers=heads,
        ).step()
        with torch.no_grad():
            model(example)
        return model

    low, high = 0, 90
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if macs_of(pruned(middle), example) <= macs * dense else (middle, high)
    return pruned(high)


def macs_of(model: nn.Module, example: Tensor) -> float:
    from sparsebit.sparse import model_size

    return model_size(model, example).macs


TOOLS: dict[str, Callable[[Task, float], nn.Module]] = {
    "sparsebit": sparsebit,
    "torch_pruning layer": lambda task, macs: torch_pruning(task, macs, is_global=False),
    "torch_pruning global": lambda task, macs: torch_pruning(task, macs, is_global=True),
}


def finetune(options: argparse.Namespace) -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    folder = data_folder() / "cifar10"
    whole = folder / "train.npz"
    file = options.train or (whole if whole.exists() else folder / "train_10k.npz")
    for name in options.models.split(","):
        task = cifar(name, options.images, options.calibration)
        images = TrainingImages(file, name, options.limit, options.device)
        recipe = _recipe(options, name, len(images.labels))
        dense = task.evaluate(task.model.eval())[0]
        row = {
            "benchmark": "sparse_finetune",
            "model": name,
            "float": dense,
            "goal": round(dense - 1.0, 2),
            "images": options.images,
            "training_images": len(images.labels),
            "epochs": round(recipe.steps * recipe.batch / len(images.labels), 1),
            "recipe": asdict(recipe),
            "seed": options.seed,
        }
        for tool in options.tools.split(","):
            try:
                found = _row(options, task, images, tool, recipe)
            except Exception as error:  # a tool's failure is a result
                found = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
            emit({**row, "tool": tool, **found}, options.json)


def _recipe(options: argparse.Namespace, name: str, num_images: int) -> Recipe:
    recipe = RECIPES[name]
    recipe = replace(recipe, batch=min(options.batch or recipe.batch, num_images), lr=options.lr or recipe.lr)
    if options.epochs is None:
        return recipe
    return replace(recipe, steps=max(1, round(options.epochs * num_images / recipe.batch)))


def _row(options: argparse.Namespace, task: Task, images: TrainingImages, tool: str, recipe: Recipe) -> dict[str, Any]:
    torch.manual_seed(options.seed)
    start = time.perf_counter()
    small = TOOLS[tool](task, options.macs).eval()
    pruned_s = time.perf_counter() - start
    example = task.calibration[0][:2]
    left = macs_of(small, example) / macs_of(task.model, example)
    before = task.evaluate(small)[0]
    small.to(options.device)
    teacher = copy.deepcopy(task.model).to(options.device).eval()
    start = time.perf_counter()
    train(small, teacher, images, recipe)
    return {
        "macs_left": round(left, 3),
        "before_training": before,
        "trained": task.evaluate(small)[0],
        "pruning_seconds": round(pruned_s, 1),
        "training_seconds": round(time.perf_counter() - start, 1),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet20,mobilenetv2")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--macs", type=float, default=0.5, help="the share that stays")
    parser.add_argument("--epochs", type=float, help="how often each image is seen; default: the recipe's steps")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=Path, help="an archive of training images; default: those of the data folder")
    parser.add_argument("--limit", type=int, help="so many training images")
    parser.add_argument("--images", type=int, default=5000, help="test images")
    parser.add_argument("--calibration", type=int, default=512, help="training images, without labels")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    finetune(parser.parse_args(arguments))
