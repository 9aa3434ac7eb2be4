"""CIFAR-10 accuracy of models trained with quantization, and of their files.

    python benchmarks/qat_accuracy.py train --folder build/qat [--only resnet20_w4a4]     # wants a GPU
    python benchmarks/qat_accuracy.py file --folder build/qat [--output results/qat_accuracy.jsonl]

`train` runs the recipes below (all 50,000 training images: `cifar10/train.npz` in the data folder) and keeps each model
in a folder of its own; `file` exports it, passes the parity gate and scores the file on the 5,000 test images, on any
machine. One JSON line each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, data_folder, emit, hardware

sys.path.insert(0, str(ROOT / "examples"))
from ptq_cifar10 import accuracy, load_images, load_model

RECIPES: dict[str, dict[str, Any]] = {
    "resnet20_w4a4": {"model": "resnet20", "config": "resnet20_w4a4_lsq.yaml", "epochs": 40, "lr": 0.02},
    "resnet20_w2a2": {"model": "resnet20", "config": "resnet20_w2a2_lsq.yaml", "epochs": 100, "lr": 0.05},
    "mobilenetv2_w4a4": {
        "model": "mobilenetv2",
        "config": "mobilenetv2_w4a4_lsq.yaml",
        "epochs": 25,
        "lr": 0.02,
        "bf16": True,
    },
    "vit_w4a4": {
        "model": "vit",
        "config": "vit_w4a4_lsq.yaml",
        "epochs": 40,
        "lr": 5e-4,
        "optimizer": "adamw",
        "bf16": True,
    },
}
SEED = 0


def train(name: str, folder: Path) -> None:
    """In a process of its own: a CUDA graph and its memory end with it."""
    recipe = RECIPES[name]
    command = [sys.executable, str(ROOT / "examples" / "qat_cifar10.py"), "--json", "--no-export"]
    command += ["--model", recipe["model"], "--config", str(ROOT / "examples" / "configs" / recipe["config"])]
    command += ["--epochs", str(recipe["epochs"]), "--lr", str(recipe["lr"]), "--seed", str(SEED)]
    command += ["--optimizer", recipe.get("optimizer", "sgd")]
    command += ["--bf16"] if recipe.get("bf16") else []
    command += ["--data", str(data_folder()), "--save", str(folder / name)]
    start = time.monotonic()
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(told[told.index("{") :])
    scores = {who: round(score["top-1 %"], 2) for who, score in found["scores"].items()}
    record = {**recipe, "seed": SEED, "seconds": round(time.monotonic() - start), "scores": scores}
    (folder / f"{name}.json").write_text(json.dumps({**record, "trained_on": hardware()}, indent=1))


def score_file(name: str, folder: Path, output: Path | None) -> None:
    from common import FileModel

    from sparsebit.quantization import QuantModel

    record = json.loads((folder / f"{name}.json").read_text())
    model, normalisation = load_model(data_folder() / "cifar10", record["model"])
    images, labels = load_images(data_folder() / "cifar10" / "test_5k.npz", normalisation, None)
    qmodel = QuantModel.load(folder / name, model, device="cpu")
    file = folder / f"{name}.onnx"
    axes = {"input": {0: "batch"}}
    parity = qmodel.export_onnx(images[:2], file, ["input"], dynamic_axes=axes, check=[images[:64]])
    assert parity is not None
    # Training evaluates in TF32 or bfloat16; a file computes in float32, as this does.
    record["scores"]["in float32"] = round(accuracy(qmodel, images, labels, "cpu"), 2)
    record["scores"]["file"] = round(accuracy(FileModel(file, qmodel.config.BACKEND), images, labels, "cpu"), 2)
    record["file_bytes"] = file.stat().st_size
    record["parity"] = parity.to_dict()
    emit({"benchmark": "qat_accuracy", "recipe": name, **record}, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("train", "file"))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "qat")
    parser.add_argument("--only", default=",".join(RECIPES), help="recipes, with commas between")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    for name in options.only.split(","):
        if options.step == "train":
            train(name, options.folder)
        else:
            score_file(name, options.folder, options.output)


if __name__ == "__main__":
    main()
