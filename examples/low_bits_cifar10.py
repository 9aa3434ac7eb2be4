"""CIFAR-10 at 4, 3 and 2 bits: what calibration gives, and what GPTQ and reconstruction bring back, without labels.

    python examples/low_bits_cifar10.py                                    # ResNet-20, W4A8, seconds
    python examples/low_bits_cifar10.py --config examples/configs/cifar10_w3a8.yaml --effort best
    python examples/low_bits_cifar10.py --model vit --config examples/configs/cifar10_w4a4.yaml --effort best

"good" takes seconds on a CPU, "best" minutes; `--resume DIR` keeps what is finished, and a run that was killed goes on
after it. Runtimes do not multiply 4-bit by 8-bit integers: the file is smaller, not faster.
"""

from __future__ import annotations

import time
from pathlib import Path

from common import CONFIGS, arguments, export, finish
from ptq_cifar10 import accuracy, load_images, load_model
from public_data import cifar10
from torch import nn

import sparsebit
from sparsebit.quantization import parse_qconfig


def main() -> None:
    parser = arguments(__doc__, limit="images", config=str(CONFIGS / "cifar10_w4a8.yaml"))
    parser.add_argument("--model", choices=("resnet20", "mobilenetv2", "vit"), default="resnet20")
    parser.add_argument("--effort", choices=("good", "best"), default="good")
    parser.add_argument("--images", type=int, default=256, help="for calibration (%(default)s)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="keep finished layers and blocks there")
    options = parser.parse_args()
    folder = options.data / "cifar10"
    model, normalisation = load_model(folder, options.model)
    train_file, test_file = cifar10(folder)
    count = min(options.images, options.limit or options.images)
    calibration, _ = load_images(train_file, normalisation, count)
    images, labels = load_images(test_file, normalisation, options.limit)

    config = parse_qconfig(options.config)
    batches = list(calibration.split(64))

    def top1(candidate: nn.Module, seconds: float | None = None) -> dict[str, float]:
        found = {"top-1 %": accuracy(candidate, images, labels, config.DEVICE)}
        return found if seconds is None else found | {"seconds": seconds}

    scores = {"float": top1(model.to(config.DEVICE))}
    for name, effort in (("calibrated", "fast"), ("quantized", options.effort)):
        start = time.perf_counter()
        resume = None if effort == "fast" else options.resume
        qmodel = sparsebit.quantize(model, batches, config, effort=effort, resume=resume)
        scores[name] = top1(qmodel, time.perf_counter() - start)
    exported = export(qmodel, options, options.model, example=batches[0], free={0: "batch"}, check=batches)
    if exported is not None:
        scores["file"] = top1(exported.model) | {"seconds": scores["quantized"]["seconds"]}
    finish(qmodel, batches[0], scores, options, exported)


if __name__ == "__main__":
    main()
