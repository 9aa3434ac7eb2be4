"""CIFAR-10: fewer channels, no fine-tuning, then int8: one file that is physically smaller and passed the parity gate.

    python examples/prune_cifar10.py
    python examples/prune_cifar10.py --model mobilenetv2 --macs 0.66

Channels go under a budget of MACs, the weights that are left are fitted to the dense model on training images without
labels, and the smaller model (of the user's own class) is quantized and exported as any other.
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import CONFIGS, arguments, export, finish
from ptq_cifar10 import accuracy, load_images, load_model
from public_data import cifar10
from torch import nn

import sparsebit
from sparsebit.quantization import parse_qconfig
from sparsebit.sparse import SparseModel, load, model_size, save


def main() -> None:
    parser = arguments(__doc__, limit="images", config=str(CONFIGS / "cifar10_w8a8.yaml"))
    parser.add_argument("--model", choices=("resnet20", "mobilenetv2"), default="resnet20")
    parser.add_argument("--macs", type=float, default=0.7, help="the share of MACs that stays (%(default)s)")
    parser.add_argument("--pruned", type=Path, metavar="DIR", help="keep the smaller float model there")
    options = parser.parse_args()
    folder = options.data / "cifar10"
    model, normalisation = load_model(folder, options.model)
    train_file, test_file = cifar10(folder)
    calibration, _ = load_images(train_file, normalisation, min(512, options.limit or 512))
    images, labels = load_images(test_file, normalisation, options.limit)
    config = parse_qconfig(options.config)
    batches = calibration.split(64)

    def top1(candidate: nn.Module) -> dict[str, float]:
        return {"top-1 %": accuracy(candidate, images, labels, config.DEVICE)}

    scores = {"float": top1(model.to(config.DEVICE))}
    sconfig = {"DEVICE": config.DEVICE, "SPARSER": {"TYPE": "structured", "STRATEGY": "l1norm"}}
    smodel = SparseModel(model, sconfig, example_inputs=batches[0][:2]).eval()
    smodel.choose_ratios({"macs": options.macs}, batches[:1])
    smodel.calc_params()
    scores["pruned"] = top1(smodel)
    smodel.reconstruct(batches)
    small = smodel.shrink()  # a plain module of the same class
    if options.pruned is not None:  # the folder rebuilds it from the unpruned class
        small = load(save(small, options.pruned), model).eval().to(config.DEVICE)
    scores["reconstructed"] = top1(small)
    before, after = (model_size(m, batches[0][:1]).macs for m in (model, small))
    scores["float"]["MACs (M)"], scores["reconstructed"]["MACs (M)"] = before / 1e6, after / 1e6

    qmodel = sparsebit.quantize(small, batches, config)
    with torch.no_grad():
        scores["quantized"] = top1(qmodel)
    exported = export(qmodel, options, f"{options.model}-pruned", example=batches[0], free={0: "batch"}, check=batches)
    if exported is not None:
        scores["file"] = top1(exported.model)
    finish(qmodel, batches[0], scores, options, exported)


if __name__ == "__main__":
    main()
