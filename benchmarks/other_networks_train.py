"""Trains the networks of `other_networks.py` on CIFAR-10, to measure efforts on what they were not tuned on.

    python benchmarks/other_networks_train.py CIFAR WEIGHTS [--nets regnet,mixer] [--epochs 25] [--device cuda]
    python benchmarks/effort.py --other CIFAR WEIGHTS --tasks regnet,mixer --bits W4A8,W4A4 --images 1024 --device cuda

CIFAR: a folder with train.npz and test.npz (`images`, uint8, samples x 32 x 32 x 3, and `labels`). WEIGHTS gets a file
of safetensors for each network. Random crops and mirrored images, label smoothing, one cycle of the learning rate; on a
GPU in bfloat16. One JSON line for each: top-1 on the test images.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from common import emit
from models import cifar_images, top1
from other_networks import NETS
from safetensors.torch import save_file
from torch import Tensor, nn

# Optimizer, largest learning rate, weight decay.
RECIPES = {
    "vgg11": ("sgd", 0.2, 5e-4),
    "wrn16_2": ("sgd", 0.4, 5e-4),
    "regnet": ("sgd", 0.4, 5e-4),
    "efficientnet": ("sgd", 0.3, 3e-4),
    "mobilenetv3": ("sgd", 0.3, 3e-4),
    "convnext": ("adamw", 2e-3, 0.05),
    "densenet": ("sgd", 0.3, 5e-4),
    "mixer": ("adamw", 2e-3, 0.05),
}
PADDING = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cifar", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--nets", default=",".join(NETS))
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--limit", type=int, help="a quick look: so many images of each split")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.weights.mkdir(parents=True, exist_ok=True)
    for name in options.nets.split(","):
        emit({"benchmark": "other_networks_train", **train(name, options)}, options.json)


def train(name: str, options: argparse.Namespace) -> dict[str, Any]:
    device = options.device
    torch.manual_seed(0)
    model = NETS[name]().to(device, memory_format=torch.channels_last)
    images, labels = (x.to(device) for x in cifar_images(options.cifar / "train.npz", options.limit))
    padded = nn.functional.pad(images, (PADDING,) * 4, "reflect")
    kind, rate, decay = RECIPES[name]
    optimizer = optimizer_of(model, kind, rate, decay)
    each = max(1, len(images) // options.batch)
    start, step = time.perf_counter(), 0
    for _ in range(options.epochs):
        for chosen in torch.randperm(len(images), device=device).split(options.batch)[:each]:
            for group in optimizer.param_groups:
                group["lr"] = rate * one_cycle(step / (options.epochs * each))
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu"):
                outputs = model(augmented(padded, chosen).contiguous(memory_format=torch.channels_last))
            loss = nn.functional.cross_entropy(outputs.float(), labels[chosen], label_smoothing=0.1)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            step += 1
    seconds = time.perf_counter() - start
    save_file(
        {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()},
        options.weights / f"{name}.safetensors",
    )
    images, labels = cifar_images(options.cifar / "test.npz", options.limit)
    with torch.no_grad():
        outputs = torch.cat([model.eval()(part.to(device)).cpu() for part in images.split(500)])
    return {
        "net": name,
        "top1": round(top1(outputs, labels), 2),
        "epochs": options.epochs,
        "seconds": round(seconds, 1),
    }


def augmented(padded: Tensor, chosen: Tensor) -> Tensor:
    """Crops at random places of these images, half of them mirrored."""
    count, size = len(chosen), padded.shape[-1] - 2 * PADDING
    steps = torch.arange(size, device=padded.device)
    top, left = (torch.randint(0, 2 * PADDING + 1, (count, 1), device=padded.device) for _ in range(2))
    is_mirrored = torch.rand(count, 1, device=padded.device) < 0.5
    rows, columns = top + steps, left + torch.where(is_mirrored, size - 1 - steps, steps)
    return padded[chosen[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def optimizer_of(model: nn.Module, kind: str, rate: float, decay: float) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.99))


def one_cycle(progress: float) -> float:
    """Up in the first fifth, then a cosine to zero."""
    if progress < 0.2:
        return 0.05 + 0.95 * progress / 0.2
    return 0.5 * (1 + math.cos(math.pi * (progress - 0.2) / 0.8))


if __name__ == "__main__":
    main()
