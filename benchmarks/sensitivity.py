"""How well the scores of `sensitivity` order layers: rank correlation with the true loss of each one quantized alone.

    python benchmarks/sensitivity.py [--tasks resnet20,mobilenetv2] [--bits 3] [--images 1000] [--json FILE]

The true loss of a layer, with its weight alone quantized to `--bits`, on the first `--images` test images: how much the
cross entropy with the labels grows ("loss"), and the divergence of the class probabilities from those of the float
model ("divergence"). The scores are those of 64 calibration images without labels: the one-pass score ("gradient", the
default, a Fisher score), "sqnr" and "kl".
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from accuracy import config
from common import emit
from models import cifar
from scipy.stats import spearmanr
from torch.nn.functional import cross_entropy, kl_div

import sparsebit
from sparsebit.quantization import QuantModel, sensitivity

METHODS = ("gradient", "sqnr", "kl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="resnet20,mobilenetv2")
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--images", type=int, default=1000, help="of the test set, for the true loss")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for task in options.tasks.split(","):
        for row in rows(task, options.bits, options.images):
            emit({"benchmark": "sensitivity", **row}, options.json)


def rows(name: str, bits: int, num_images: int) -> list[dict[str, Any]]:
    task = cifar(name, num_images=num_images, num_calibration=64)
    qmodel = sparsebit.quantize(task.model, task.calibration, config("virtual", "mse", bits, 8))
    loss, divergence = true_losses(qmodel, task)
    found = []
    for method in METHODS:
        cpu = time.process_time()
        scores = sensitivity(qmodel, task.calibration, method=method, weight_bits=(bits,)).scores
        cpu = time.process_time() - cpu
        order = [scores[site][bits] for site in loss]
        found.append(
            {
                "task": name,
                "bits": f"W{bits}",
                "way": method,
                "images": num_images,
                "num_sites": len(loss),
                "with_loss": round(float(spearmanr(order, list(loss.values())).statistic), 3),
                "with_divergence": round(float(spearmanr(order, list(divergence.values())).statistic), 3),
                "cpu_seconds": round(cpu, 1),
            }
        )
    return found


def true_losses(qmodel: QuantModel, task: Any) -> tuple[dict[str, float], dict[str, float]]:
    """By site, with the weight of this layer alone quantized: growth of the loss, divergence from the float model."""
    qmodel.set_quant(w_quant=False, a_quant=False)
    _, original = task.evaluate(qmodel)
    loss, divergence = {}, {}
    for site, quantizer in qmodel.sites.items():
        if quantizer.target == "weight":
            quantizer.use_quant = True
            _, outputs = task.evaluate(qmodel)
            quantizer.use_quant = False
            loss[site] = float(cross_entropy(outputs, task.labels) - cross_entropy(original, task.labels))
            target = original.log_softmax(-1)
            divergence[site] = float(kl_div(outputs.log_softmax(-1), target, reduction="batchmean", log_target=True))
    qmodel.set_quant(w_quant=True, a_quant=True)
    return loss, divergence


if __name__ == "__main__":
    main()
