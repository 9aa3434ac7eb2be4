"""CIFAR-10, trained with quantization on: ResNet-20, MobileNetV2 or a small ViT, up to the ONNX file.

    python examples/qat_cifar10.py --model resnet20
    python examples/qat_cifar10.py --model resnet20 --config examples/configs/resnet20_w2a2_lsq.yaml --lr 0.05
    python examples/qat_cifar10.py --model vit

The student starts as the float model, and learns from the labels and from the float model's answers. Training images
come from `cifar10/train.npz` in the data folder (all 50,000) or, where that is missing, from `train_10k.npz`. On a GPU
a step is a CUDA graph (`CudaGraphStep`): a small network takes longer to start its kernels than to run them.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import CONFIGS, arguments, existing, export, finish
from ptq_cifar10 import accuracy, load_images, load_model
from public_data import cifar10
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from sparsebit.quantization import CudaGraphStep, DistillationLoss, QuantModel, parse_qconfig


@dataclass(frozen=True)
class Recipe:
    """How a model is trained unless the command line says otherwise."""

    config: str
    lr: float
    optimizer: str = "sgd"


RECIPES = {
    "resnet20": Recipe("resnet20_w4a4_lsq.yaml", lr=0.02),
    "mobilenetv2": Recipe("mobilenetv2_w4a4_lsq.yaml", lr=0.02),
    "vit": Recipe("vit_w4a4_lsq.yaml", lr=5e-4, optimizer="adamw"),
}


class TrainingImages:
    """All images on the device as bytes; batches are shifted by up to four pixels, mirrored and normalised there."""

    def __init__(self, file: Path, normalisation: tuple[tuple[float, ...], tuple[float, ...]], device: str) -> None:
        archive = np.load(existing(file))
        self.images = F.pad(torch.from_numpy(archive["images"]).permute(0, 3, 1, 2), (4, 4, 4, 4)).to(device)
        self.labels = torch.from_numpy(archive["labels"].astype(np.int64)).to(device)
        mean, std = (torch.tensor(values, device=device).view(3, 1, 1) * 255 for values in normalisation)
        self.mean, self.std, self.device = mean, std, device

    def __len__(self) -> int:
        return len(self.labels)

    def epoch(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(self), device=self.device).split(batch):
            if len(chosen) == batch:
                yield self.augmented(chosen), self.labels[chosen]

    def augmented(self, chosen: Tensor) -> Tensor:
        top, left = torch.randint(0, 9, (2, len(chosen), 1), device=self.device)
        span = torch.arange(32, device=self.device)
        rows, columns = (top + span)[:, None, :, None], (left + span)[:, None, None, :]
        columns = torch.where(torch.rand(len(chosen), 1, 1, 1, device=self.device) < 0.5, columns.flip(3), columns)
        channels = torch.arange(3, device=self.device)[None, :, None, None]
        crops = self.images[chosen[:, None, None, None], channels, rows, columns]
        return (crops.float() - self.mean) / self.std


def train(
    qmodel: QuantModel,
    teacher: nn.Module,
    images: TrainingImages,
    *,
    epochs: int,
    batch: int,
    lr: float,
    optimizer_name: str,
    bf16: bool,
) -> None:
    optimizer: torch.optim.Optimizer
    decay = 0.05 if optimizer_name == "adamw" else 1e-4
    groups = qmodel.parameter_groups(lr=lr, scale_lr=lr / 10, weight_decay=decay)
    fused = images.device == "cuda"  # one kernel for all parameters
    if optimizer_name == "adamw":
        optimizer = torch.optim.AdamW(groups, fused=fused)
    else:
        optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True, fused=fused)
    num_steps = epochs * (len(images) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 200) * (1 + math.cos(math.pi * step / num_steps)) / 2
    )
    qmodel.train()
    loss = DistillationLoss(teacher, temperature=4.0, alpha=0.7)
    half = torch.bfloat16 if bf16 else None
    step = CudaGraphStep(qmodel, lambda model, inputs, labels: loss(model(inputs), inputs, labels), half=half)
    for _ in track(range(epochs), description="training", console=Console(stderr=True)):
        for inputs, labels in images.epoch(batch):
            step(inputs, labels)
            optimizer.step()
            schedule.step()
    qmodel.eval()


def main() -> None:
    parser = arguments(__doc__, limit="images", config="")
    parser.add_argument("--model", choices=RECIPES, default="resnet20")
    parser.add_argument("--epochs", type=int, default=30, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="images a step (%(default)s)")
    parser.add_argument("--lr", type=float, help="of the weights (the recipe's); step sizes learn at a tenth of it")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), help="(the recipe's)")
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16, with convolutions in NHWC")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    recipe = RECIPES[options.model]
    options.config = options.config or str(CONFIGS / recipe.config)
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")  # TF32 where a GPU has it
    torch.backends.cudnn.allow_tf32 = True
    folder = options.data / "cifar10"
    model, normalisation = load_model(folder, options.model)
    train_file, test_file = cifar10(folder)
    whole = folder / "train.npz"
    training = TrainingImages(whole if whole.exists() else train_file, normalisation, options.device)
    if options.limit:
        training.images, training.labels = training.images[: options.limit], training.labels[: options.limit]
    images, labels = load_images(test_file, normalisation, options.limit)

    config = parse_qconfig(parse_qconfig(options.config).to_dict() | {"DEVICE": options.device})
    qmodel = QuantModel(model, config)
    qmodel.prepare_calibration()
    batch = min(options.batch, len(training))
    calibration = [inputs for inputs, _ in (next(training.epoch(batch)) for _ in range(4))]
    with torch.no_grad():
        for inputs in calibration:
            qmodel(inputs)
    qmodel.init_QAT()

    def top1(candidate: nn.Module, device: str = options.device) -> dict[str, float]:
        return {"top-1 %": accuracy(candidate, images, labels, device)}

    teacher = model.to(options.device)
    scores = {"float": top1(teacher), "before training": top1(qmodel)}
    before = ", ".join(f"{name} {score['top-1 %']:.1f} %" for name, score in scores.items())
    print(f"{before}; training {options.epochs} epochs of {len(training)} images", file=sys.stderr)
    if options.bf16:
        qmodel.to(memory_format=torch.channels_last)
        teacher.to(memory_format=torch.channels_last)
    start = time.perf_counter()
    train(
        *(qmodel, teacher, training),
        epochs=options.epochs,
        batch=batch,
        lr=options.lr or recipe.lr,
        optimizer_name=options.optimizer or recipe.optimizer,
        bf16=options.bf16,
    )
    seconds = time.perf_counter() - start
    scores["quantized"] = top1(qmodel)
    said = f"{options.epochs} epochs of {len(training)} images in {seconds:.0f} s on {options.device}"
    print(said, file=sys.stderr if options.json else sys.stdout)
    qmodel.to("cpu")
    check = [inputs.cpu()[:64] for inputs in calibration[:2]]
    exported = export(qmodel, options, options.model, example=check[0], free={0: "batch"}, check=check)
    if exported is not None:
        scores["file"] = top1(exported.model, "cpu")
    finish(qmodel, check[0], scores, options, exported)


if __name__ == "__main__":
    main()
