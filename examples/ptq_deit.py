"""DeiT-tiny: a vision transformer, plain and with the config that it wants (`configs/deit_w8a8.yaml`).

    python examples/ptq_deit.py --pretrained --images path/to/val

Behind a LayerNorm a few channels are far larger than the rest. The config gives those tensors a scale per channel
(`LAYOUT: NLC` says that the channel is the last axis) and lets the residual stream pass in float. Two tables: the plain
8-bit flow, then the config. Without `--pretrained` or `--weights` the weights are random: read the SQNR, not the top-1.
"""

from __future__ import annotations

from common import CONFIGS, arguments, finish
from images import LabelledImages, add_arguments, compare, load_classifier, split

import sparsebit


def main() -> None:
    parser = arguments(__doc__, limit="images", config=str(CONFIGS / "deit_w8a8.yaml"))
    add_arguments(parser)
    options = parser.parse_args()

    model, transform = load_classifier("deit_tiny_patch16_224", pretrained=options.pretrained, weights=options.weights)
    folder = options.images or options.data / "imagenet_samples" / "images"
    calibration, test = split(LabelledImages(folder, transform), options.limit, options.batch_size)
    batch, _ = next(iter(calibration))

    plain = sparsebit.quantize(model, calibration, "virtual")
    finish(plain, batch, compare(model, plain, test, plain.config.DEVICE))

    qmodel = sparsebit.quantize(model, calibration, options.config)
    finish(qmodel, batch, compare(model, qmodel, test, qmodel.config.DEVICE), options.save)


if __name__ == "__main__":
    main()
