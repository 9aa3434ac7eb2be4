r"""An ImageNet classifier trained with quantization on, in one process or several, up to the ONNX file.

    python examples/qat_imagenet.py --model resnet18 --pretrained --images path/to/imagenet
    torchrun --nproc-per-node 8 examples/qat_imagenet.py --model torchvision/resnet50 --pretrained \
        --images path/to/imagenet --bf16 --channels-last --compile --ema 0.9999
    python examples/qat_imagenet.py --model deit_tiny_patch16_224 --pretrained --images path/to/imagenet \
        --config examples/configs/deit_w4a4_lsq.yaml --optimizer adamw

The images are `train/CLASS/*.jpg` and `val/CLASS/*.jpg` in one folder. A folder without `train`, such as the samples in
the data folder, is divided: every fourth image is scored, the others train. After every epoch a checkpoint is written;
the same command with `--resume` goes on behind it, and ends as if it had not been interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import CONFIGS, arguments, existing, export, finish
from images import LabelledImages, Transform, add_arguments, augmented, load_classifier
from public_data import labelled_images
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, Subset

from sparsebit import Tolerance
from sparsebit.quantization import DistillationLoss, FreezeSchedule, QuantModel, parse_qconfig

Batches = Iterable[tuple[Tensor, Tensor]]
LEARNING_RATES = {"sgd": 0.01, "adamw": 2e-4}  # for a batch of 256
# What must be the same when a run is resumed, besides the config and the number of processes.
RECIPE = (
    *("model", "limit", "batch_size", "epochs", "optimizer", "lr", "scale_lr", "weight_decay", "warmup", "seed"),
    *("distill", "temperature", "ema", "freeze_batchnorm", "freeze_scales", "bf16"),
)


@dataclass(frozen=True)
class Job:
    """This process among those that train together, and where it computes."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls, device: str) -> Job:
        """The processes of `torchrun`, made known to each other; without it, one alone."""
        if "RANK" not in os.environ:
            return cls(0, 1, torch.device(device))
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        return cls(dist.get_rank(), dist.get_world_size(), torch.device(device))


@dataclass(frozen=True)
class Data:
    """Images to train on, the same ones without augmentation, and images to score."""

    training: Subset[Any]
    plain: Subset[Any]
    test: Subset[Any]

    @classmethod
    def load(cls, folder: Path, transform: Transform, limit: int | None) -> Data:
        if (existing(folder) / "train").is_dir():
            images, scored = (LabelledImages(folder / part, transform) for part in ("train", "val"))
            if images.classes != scored.classes:
                sys.exit(f"{folder}: train and val have different classes, whose order would number them differently")
            chosen, held = range(len(images)), range(len(scored))
        else:
            images = scored = LabelledImages(folder, transform)
            held = range(len(images))[3::4]
            chosen = sorted(set(range(len(images))) - set(held))
        chosen, held = spread(chosen, limit), spread(held, limit)
        return cls(Subset(images.through(augmented(transform)), chosen), Subset(images, chosen), Subset(scored, held))


def spread(indices: Any, count: int | None) -> list[int]:
    """At most `count` of them, evenly over all: files stand class by class."""
    if count is None or count >= len(indices):
        return list(indices)
    return [indices[number * len(indices) // count] for number in range(count)]


class TrainingBatches:
    """Epochs of this process's batches: every epoch has its own order and crops, the same ones when it is repeated."""

    def __init__(self, data: Data, job: Job, options: argparse.Namespace) -> None:
        self.job, self.seed = job, options.seed
        batch_size = min(options.batch_size, len(data.training) // job.size)
        if not batch_size:
            sys.exit(f"{len(data.training)} training images are too few for {job.size} processes")
        order = DistributedSampler(data.training, job.size, job.rank, seed=options.seed, drop_last=True)
        self.loader = DataLoader(
            *(data.training, batch_size),
            sampler=order,
            num_workers=options.workers,
            pin_memory=job.device.type == "cuda",
            drop_last=True,
        )
        self.order, self.num_together = order, batch_size * job.size

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        self.order.set_epoch(number)
        torch.manual_seed((self.seed * 10_000 + number) * 10_000 + self.job.rank)  # crops, here and in the workers
        return on_device(self.loader, self.job.device)


def on_device(batches: Batches, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    for images, labels in batches:
        yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def part(images: Subset[Any], job: Job, options: argparse.Namespace) -> DataLoader[Any]:
    """Every process's share of `images`, in order."""
    share = Subset(images, range(len(images))[job.rank :: job.size])
    return DataLoader(share, options.batch_size, num_workers=options.workers)


@torch.no_grad()
def top1(model: nn.Module, batches: Batches, device: torch.device) -> dict[str, float]:
    """Of all processes together, each with its own batches."""
    counts = torch.zeros(2, dtype=torch.float64).to(device)
    for images, labels in on_device(batches, device):
        counts += torch.stack([(model(images).argmax(1) == labels).sum(), torch.tensor(len(labels), device=device)])
    if dist.is_initialized():
        dist.all_reduce(counts)
    hits, total = counts.tolist()
    return {"top-1 %": 100 * hits / total}


class Training:
    """The quantized model, and all that moves it; whole and resumable as `parts`."""

    def __init__(self, qmodel: QuantModel, teacher: nn.Module, batches: TrainingBatches, options: argparse.Namespace):
        self.qmodel, self.batches, self.options = qmodel, batches, options
        steps, job = options.epochs * len(batches), batches.job
        lr = (options.lr or LEARNING_RATES[options.optimizer]) * batches.num_together / 256
        groups = qmodel.parameter_groups(lr=lr, scale_lr=lr * options.scale_lr, weight_decay=options.weight_decay)
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(groups) if options.optimizer == "adamw" else torch.optim.SGD(groups, momentum=0.9)
        )
        warmup = max(1.0, options.warmup * len(batches))
        self.rates = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / warmup) * (1 + math.cos(math.pi * step / steps)) / 2
        )
        self.averaged: AveragedModel | None = None
        if options.ema:
            self.averaged = AveragedModel(qmodel, multi_avg_fn=get_ema_multi_avg_fn(options.ema), use_buffers=True)
        self.student: Any = qmodel
        if job.size > 1:  # scales that are frozen on the way get no gradients any more, and the wrapper must know
            unused = options.freeze_scales is not None
            devices = [job.device] if job.device.type == "cuda" else None
            self.student = DistributedDataParallel(qmodel, device_ids=devices, find_unused_parameters=unused)
        starts = {"batchnorm": options.freeze_batchnorm, "scales": options.freeze_scales}
        self.freezing = FreezeSchedule(
            qmodel, **{part: int(share * steps) for part, share in starts.items() if share is not None}
        )
        if options.compile:
            teacher = torch.compile(teacher)
            if job.size > 1:
                self.student = torch.compile(self.student)
            else:
                qmodel.compile()
        distillation = DistillationLoss(teacher, options.temperature, options.distill)
        self.loss = distillation if options.distill else lambda output, _, labels: F.cross_entropy(output, labels)

    @property
    def parts(self) -> dict[str, Any]:
        found = {"model": self.qmodel, "optimizer": self.optimizer, "rates": self.rates, "freezing": self.freezing}
        return found | ({"averaged": self.averaged} if self.averaged else {})

    @property
    def result(self) -> QuantModel:
        """What is scored and kept: the average, where there is one."""
        return self.averaged.module if self.averaged else self.qmodel  # type: ignore[return-value]

    def epoch(self, number: int, console: Console) -> float:
        """The mean loss."""
        self.qmodel.train()
        total = torch.zeros((), device=self.batches.job.device)
        batches = self.batches.epoch(number)
        shown = {"console": console, "transient": True, "disable": not console.is_terminal}
        for images, labels in track(batches, f"epoch {number + 1}", len(self.batches), **shown):
            with torch.autocast(images.device.type, torch.bfloat16, enabled=self.options.bf16):
                loss = self.loss(self.student(images), images, labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.rates.step()
            self.freezing.step()
            if self.averaged:
                self.averaged.update_parameters(self.qmodel)
            total += loss.detach()
        self.qmodel.eval()
        return float(total) / len(self.batches)


@torch.no_grad()
def fold_norms(qmodel: QuantModel, batches: Batches) -> None:
    """New statistics for batch norms, where the config has kept them; then they go into the layers in front of them.

    Every process runs batches of its own; what they find is merged.
    """
    if not any(isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)) for module in qmodel.modules()):
        return
    with qmodel.batchnorm_tuning():
        for images, _ in batches:
            qmodel(images)
    qmodel.set_quant(w_quant=True, a_quant=True)


def checkpoint(file: Path, training: Training, **facts: Any) -> None:
    """Written whole or not at all: an interruption leaves the one before."""
    written = file.with_name(f"{file.name}.part")
    torch.save({name: part.state_dict() for name, part in training.parts.items()} | facts, written)
    written.replace(file)


def read_checkpoint(file: Path, recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """None where there is none yet."""
    if not file.exists():
        return None
    saved = torch.load(file, map_location="cpu", weights_only=True)
    for name, value in recipe.items():
        if saved["recipe"].get(name) != value:
            was = saved["recipe"].get(name)
            sys.exit(f"{file} is of another run: {name} was {was}, now {value}; begin anew without --resume")
    return saved


def parse_arguments() -> argparse.Namespace:
    parser = arguments(__doc__, limit="images, train on as many", config=str(CONFIGS / "imagenet_w4a4_lsq.yaml"))
    parser.add_argument("--model", default="resnet18", help="timm's name, or PACKAGE/NAME (%(default)s)")
    add_arguments(parser)
    parser.set_defaults(batch_size=64)  # in every process
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="that read images")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--optimizer", choices=LEARNING_RATES, default="sgd")
    parser.add_argument("--lr", type=float, help=f"for 256 images a step, else in proportion {LEARNING_RATES}")
    parser.add_argument("--scale-lr", type=float, default=0.1, help="of quantizers, as a share of --lr (%(default)s)")
    parser.add_argument("--weight-decay", type=float, default=1e-4, help="of weights (%(default)s)")
    parser.add_argument("--warmup", type=float, default=0.5, metavar="EPOCHS", help="before the cosine (%(default)s)")
    parser.add_argument("--distill", type=float, default=0.5, help="weight of the float model's answers (%(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the distillation (%(default)s)")
    parser.add_argument("--ema", type=float, metavar="DECAY", help="keep a moving average of the weights, 0.9999 say")
    parser.add_argument("--freeze-batchnorm", type=float, metavar="SHARE", help="hold statistics after 0.8, say, of it")
    parser.add_argument("--freeze-scales", type=float, metavar="SHARE", help="hold learned scales after such a share")
    parser.add_argument(
        "--tune-batchnorm", type=int, metavar="N", help="batches for new statistics at the end (100; 0 if frozen)"
    )
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--channels-last", action="store_true", help="convolutions in NHWC")
    parser.add_argument("--compile", action="store_true", help="both student and teacher")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="written after every epoch (MODEL-qat.pt)")
    parser.add_argument("--resume", action="store_true", help="go on behind the checkpoint, if there is one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    job = Job.join(options.device)
    console = Console(stderr=True, quiet=job.rank > 0)
    name = options.model.rpartition("/")[-1]
    file = options.checkpoint or Path(f"{name}-qat.pt")
    config = parse_qconfig(options.config)
    recipe = {key: getattr(options, key) for key in RECIPE} | {"config": config.to_yaml(), "processes": job.size}
    saved = read_checkpoint(file, recipe) if options.resume else None

    model, transform = load_classifier(options.model, pretrained=options.pretrained, weights=options.weights)
    folder = options.images or labelled_images(options.data)
    data = Data.load(folder, transform, options.limit)
    batches, test = TrainingBatches(data, job, options), part(data.test, job, options)
    calibration = part(Subset(data.plain, spread(range(len(data.plain)), 256)), job, options)

    qmodel = QuantModel(model, config.replace("DEVICE", str(job.device)))
    model.to(job.device)
    if saved is None:
        qmodel.prepare_calibration()
        with torch.no_grad():
            for images, _ in on_device(calibration, job.device):
                qmodel(images)
        qmodel.init_QAT()  # all processes get the same scales
        scores = {"float": top1(model, test, job.device), "before training": top1(qmodel, test, job.device)}
    else:
        qmodel.load_state_dict(saved["model"])
        scores = saved["scores"]
    if options.channels_last:
        qmodel.to(memory_format=torch.channels_last)
        model.to(memory_format=torch.channels_last)

    training = Training(qmodel, model, batches, options)
    if saved is not None:
        for key, one in training.parts.items():
            one.load_state_dict(saved[key])
        console.print(f"{file}: {saved['epochs_done']} of {options.epochs} epochs are done")
    elif options.resume:
        console.print(f"{file} does not exist yet: from the beginning")
    for number in range(saved["epochs_done"] if saved else 0, options.epochs):
        loss = training.epoch(number, console)
        reached = top1(training.result.eval(), test, job.device)["top-1 %"]
        console.print(f"epoch {number + 1} of {options.epochs}: loss {loss:.3f}, top-1 {reached:.2f} %")
        if job.rank == 0:
            checkpoint(file, training, epochs_done=number + 1, scores=scores, recipe=recipe)

    trained = training.result.eval()
    if options.tune_batchnorm is None:  # weights have learned to live with frozen statistics: keep these
        options.tune_batchnorm = 100 if options.freeze_batchnorm is None else 0
    if not options.tune_batchnorm:
        trained.fold_batchnorm()
    else:
        fold_norms(trained, itertools.islice(batches.epoch(options.epochs), options.tune_batchnorm))
    scores["trained"] = top1(trained, test, job.device)

    if dist.is_initialized():  # what is left to do is for one
        dist.destroy_process_group()
    if job.rank == 0:
        trained.to("cpu", memory_format=torch.contiguous_format)
        check = [images[:16] for images, _ in itertools.islice(calibration, 2)]
        # At 4 bits one rounding that falls the other way is a fifteenth of the range, and may decide a close call; how
        # often the file is right, the table tells.
        drift = Tolerance(top1=0.0) if config.BACKEND == "virtual" else None
        exported = export(trained, options, name, example=check[0], free={0: "batch"}, check=check, tolerance=drift)
        if exported is not None:
            alone = Job(0, 1, torch.device("cpu"))
            scores["file"] = top1(exported.model, part(data.test, alone, options), alone.device)
        finish(trained, check[0], scores, options, exported)


if __name__ == "__main__":
    main()
