"""Accuracy of post-training quantization on real models and data.

    python benchmarks/accuracy.py [--tasks resnet20,minilm] [--observers minmax,mse] [--json FILE] [--device cuda]
    python benchmarks/accuracy.py --tasks mobilenetv2 --rows per-tensor     # only rows whose label has this word
    python benchmarks/accuracy.py --tasks resnet20 --rows mixed             # bits chosen at the bytes of uniform 4 bits
    python benchmarks/accuracy.py --tasks yolov5n --rows yolo_w8a8 --draws 12   # how much of the result is chance
    python benchmarks/accuracy.py --peers [...]     # beside other tools, see accuracy_peers.py and its options

One JSON line per task, backend and observer: the metric in float and quantized, the loss, and, where they make sense,
the agreement with float and the output SQNR on the first 2,000 samples. `--draws`: the metric again with every scale
changed in its last bits at random, as another number of threads changes them; the mean and the standard deviation.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import ROOT, emit, sqnr_db
from models import TASKS, Task, top1

import sparsebit
from sparsebit.quantization import (
    QuantConfig,
    QuantModel,
    correct_biases,
    equalize,
    gptq,
    parse_qconfig,
    reconstruct,
    search_bits,
    smooth,
)

OBSERVERS = ("minmax", "moving_average", "percentile", "mse", "kl_histogram", "aciq")


def gptq_then_reconstruct(qmodel: QuantModel, batches: list[Any], **options: Any) -> None:
    gptq(qmodel, batches)
    reconstruct(qmodel, batches, **options)


# What improves a calibrated model, on the batches that it was calibrated with.
ALGORITHMS: dict[str, Callable[..., Any]] = {
    "gptq": gptq,
    "analytic bias correction": partial(correct_biases, method="analytic"),
    "empirical bias correction": partial(correct_biases, method="empirical"),
    "adaround": partial(reconstruct, method="adaround"),
    "brecq": partial(reconstruct, method="brecq"),
    "qdrop": partial(reconstruct, method="qdrop"),
    "autoround": partial(reconstruct, method="autoround"),
    "gptq, qdrop": partial(gptq_then_reconstruct, method="qdrop"),
    "equalization": equalize,
    "smoothing": partial(smooth, insert=True),
}
# Those that are measured on few bits, and on which.
ROUNDING = [name for name in ALGORITHMS if name not in ("equalization", "smoothing")]
LOW_BITS = {
    "resnet20": ((4, 8), (3, 8), (2, 8), (4, 4)),
    "mobilenetv2": ((4, 8), (4, 4)),
    "vit": ((4, 8), (4, 4)),
    "efficientnet_lite0": ((4, 8),),
}
# Where bits are also chosen per layer, at the bytes that the uniform config takes, and among which.
MIXED = {"resnet20": (4, 8), "mobilenetv2": (4, 8)}
CANDIDATES = (2, 3, 4, 5, 6, 8)
LAST_BITS = 2e-7
# Models that the plain configs do not suit, and the config that their example recommends.
RECOMMENDED = {"minilm": "examples/configs/encoder_w8a8.yaml", "yolov5n": "examples/configs/yolo_w8a8.yaml"}


def config(
    backend: str,
    observer: str,
    weight_bits: int = 8,
    activation_bits: int = 8,
    device: str = "cpu",
    weights: str = "per-channel",
) -> dict[str, Any]:
    scheme = "per-tensor-symmetric" if backend == "tensorrt" else "per-tensor-affine"
    return {
        "BACKEND": backend,
        "DEVICE": device,
        "SCHEDULE": {"FUSE_BN": True},
        "W": {"QSCHEME": f"{weights}-symmetric", "QUANTIZER": {"BIT": weight_bits}, "OBSERVER": {"TYPE": observer}},
        "A": {"QSCHEME": scheme, "QUANTIZER": {"BIT": activation_bits}, "OBSERVER": {"TYPE": observer}},
    }


def measure(
    task: Task,
    settings: dict[str, Any] | QuantConfig,
    label: dict[str, Any],
    reference: tuple[float, torch.Tensor | None],
    num_draws: int = 0,
) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    algorithm = ALGORITHMS.get(label.get("algorithm", ""))
    if label.get("choice") == "mixed":
        uniform = sparsebit.quantize(task.model, task.calibration, settings)
        settings = search_bits(uniform, task.calibration, {"bytes": 1.0}, weight_bits=CANDIDATES).config
    qmodel = sparsebit.quantize(task.model, task.calibration, settings)
    if algorithm is not None:
        algorithm(qmodel, task.calibration)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024  # of the process so far
    score, outputs = reference
    quantized, own = task.evaluate(qmodel)
    record = {
        "task": task.name,
        **label,
        "metric": task.metric,
        "float": round(score, 4),
        "quantized": round(quantized, 4),
    }
    record |= {"loss": round(score - quantized, 4), "seconds": round(wall, 1), "cpu_seconds": round(cpu, 1)}
    record["peak_mib"] = peak
    if outputs is not None and own is not None:
        outputs, own = outputs[:2000], own[:2000]
        record["sqnr_db"] = round(sqnr_db(outputs, own), 2)
        if task.labels is not None:
            record["agreement"] = round(100 * float((own.argmax(1) == outputs.argmax(1)).float().mean()), 2)
            record["top1_first_2000"] = round(top1(own, task.labels[:2000]), 2)
    if num_draws > 1:
        found = draws(task, qmodel, num_draws)
        mean, deviation = statistics.mean(found), statistics.stdev(found)
        record |= {"draws": num_draws, "mean": round(mean, 4), "deviation": round(deviation, 4)}
    return record


def draws(task: Task, qmodel: QuantModel, count: int) -> list[float]:
    """The metric with scales that differ in their last bits."""
    state = {name: value.clone() for name, value in qmodel.state_dict().items()}
    scales = {name: value for name, value in state.items() if name.endswith("scale") and value.is_floating_point()}
    found = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        changed = {
            name: value * (1 + LAST_BITS * torch.randn(value.shape, generator=generator).to(value))
            for name, value in scales.items()
        }
        qmodel.load_state_dict(state | changed)
        found.append(float(task.evaluate(qmodel)[0]))
    return found


Variant = tuple[dict[str, Any], dict[str, Any] | QuantConfig]


def variants(task: str, observers: list[str], device: str) -> list[Variant]:
    """(label, config) of everything that is measured for a task."""

    def variant(backend: str, observer: str, weights: int = 8, activations: int = 8) -> Variant:
        label = {"backend": backend, "observer": observer, "bits": f"W{weights}A{activations}"}
        return label, config(backend, observer, weights, activations, device)

    if task in RECOMMENDED:
        recommended = parse_qconfig(ROOT / RECOMMENDED[task]).replace("DEVICE", device)
        observer = recommended.A.OBSERVER.TYPE
        label = {"backend": recommended.BACKEND, "observer": observer, "bits": "W8A8", "config": RECOMMENDED[task]}
        found = [(label, recommended), variant("virtual", observer)]
        return [*found, ({**label, "algorithm": "smoothing"}, recommended)] if task == "minilm" else found
    found = [variant(backend, observer) for backend in ("virtual", "tensorrt") for observer in observers]
    found.append(variant("onnxruntime", "minmax"))
    low = [variant("virtual", "mse", *bits) for bits in LOW_BITS.get(task, ())]
    found += low
    found += [({**label, "algorithm": name}, settings) for name in ROUNDING for label, settings in low]
    if task in MIXED:
        label, settings = variant("virtual", "mse", *MIXED[task])
        found += [({**label, "choice": "mixed", **rest}, settings) for rest in ({}, {"algorithm": "gptq"})]
    if task == "mobilenetv2":
        label = {"backend": "virtual", "observer": "minmax", "bits": "W8A8", "weights": "per-tensor"}
        whole = config("virtual", "minmax", device=device, weights="per-tensor")
        found += [(label, whole), ({**label, "algorithm": "equalization"}, whole)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--observers", default=",".join(OBSERVERS))
    parser.add_argument("--rows", default="", help="only rows with this word in their label")
    parser.add_argument("--draws", type=int, default=0, help="how often the metric is measured with other last bits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peers", action="store_true", help="beside other tools: the options of accuracy_peers.py")
    if "--peers" in sys.argv:
        import accuracy_peers

        accuracy_peers.main([argument for argument in sys.argv[1:] if argument != "--peers"])
        return
    options = parser.parse_args()
    for name in options.tasks.split(","):
        task = TASKS[name]()
        task.model.to(options.device)
        reference = task.evaluate(task.model)
        for label, settings in variants(name, options.observers.split(","), options.device):
            if not any(options.rows in str(value) for value in label.values()):
                continue
            record = measure(task, settings, label, reference, options.draws)
            emit({"benchmark": "accuracy", **record}, options.json)


if __name__ == "__main__":
    main()
