"""An ImageNet classifier by name with fewer channels, then in int8: smaller, and faster in its runtime.

    python examples/prune_imagenet.py --model resnet50 --pretrained --images path/to/val --budget latency=0.6
    python examples/prune_imagenet.py --model torchvision/mobilenet_v2 --weights mobilenet_v2.pt --budget macs=0.7

Names are timm's, or torchvision's behind `torchvision/`. The weights that are left are fitted to the dense model on
the calibration images, without labels. For more than a third of the MACs, train the smaller model afterwards, with the
dense one as teacher (`DistillationLoss`). Without weights they are random: top-1 then means nothing.
"""

from __future__ import annotations

from pathlib import Path

from common import arguments, export, finish
from images import LabelledImages, add_arguments, compare, default_images, load_classifier, split

import sparsebit
from sparsebit.quantization import parse_qconfig
from sparsebit.sparse import SparseModel, model_size, save


def main() -> None:
    parser = arguments(__doc__, limit="images", config="onnxruntime")
    parser.add_argument("--model", default="resnet18", help="timm's name, or PACKAGE/NAME (%(default)s)")
    parser.add_argument(
        "--budget", default="macs=0.7", metavar="NAME=SHARE", help="macs, bytes or latency (%(default)s)"
    )
    parser.add_argument("--round-to", type=int, default=8, help="widths stay multiples of this (%(default)s)")
    parser.add_argument("--pruned", type=Path, metavar="DIR", help="keep the smaller float model there")
    add_arguments(parser)
    options = parser.parse_args()
    budget, _, share = options.budget.partition("=")

    model, transform = load_classifier(options.model, pretrained=options.pretrained, weights=options.weights)
    folder = options.images or default_images(options.data)
    calibration, test = split(LabelledImages(folder, transform), options.limit, options.batch_size)
    batches = [images for images, _ in calibration]

    smodel = SparseModel(model, {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured"}}, batches[0][:1]).eval()
    smodel.choose_ratios({budget: float(share)}, [batches[0][:8]], round_to=options.round_to)
    smodel.calc_params()
    smodel.reconstruct(batches)
    small = smodel.shrink(options.round_to)  # a plain module of the same class
    if options.pruned is not None:
        save(small, options.pruned)

    config = options.config if options.config.endswith(".yaml") else sparsebit.PROFILES[options.config].recommended()
    qmodel = sparsebit.quantize(small, batches, parse_qconfig(config).replace("DEVICE", "cpu"))
    name = f"{options.model.rpartition('/')[-1]}-pruned"
    exported = export(qmodel, options, name, example=batches[0], free={0: "batch"}, check=batches)

    models = {"float": model, "pruned": small, "quantized": qmodel} | ({"file": exported.model} if exported else {})
    scores = {key: dict(row) for key, row in compare(models, test, "cpu").items()}
    for key, candidate in (("float", model), ("pruned", small)):
        scores[key]["MACs (M)"] = model_size(candidate, batches[0][:1]).macs / 1e6
    finish(qmodel, batches[0], scores, options, exported)


if __name__ == "__main__":
    main()
