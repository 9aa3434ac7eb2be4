"""DeiT-tiny: a vision transformer, plain and with the config that it wants (`configs/deit_w8a8.yaml`).

    python examples/ptq_deit.py --pretrained --images path/to/val
    python examples/ptq_deit.py --config examples/configs/deit_per_channel.yaml

`plain` is 8 bits for the inputs of every op, where the residual stream is rounded again and again; `quantized` is the
config, and the file comes of that. Without `--pretrained` or `--weights` the weights are random: read the SQNR, not the
top-1.
"""

from __future__ import annotations

from common import CONFIGS, arguments, export, finish
from images import LabelledImages, add_arguments, compare, default_images, load_classifier, split

import sparsebit


def main() -> None:
    parser = arguments(__doc__, limit="images", config=str(CONFIGS / "deit_w8a8.yaml"))
    add_arguments(parser)
    options = parser.parse_args()

    model, transform = load_classifier("deit_tiny_patch16_224", pretrained=options.pretrained, weights=options.weights)
    folder = options.images or default_images(options.data)
    calibration, test = split(LabelledImages(folder, transform), options.limit, options.batch_size)
    batch, _ = next(iter(calibration))

    plain = sparsebit.quantize(model, calibration, "virtual")
    qmodel = sparsebit.quantize(model, calibration, options.config)
    exported = export(qmodel, options, "deit_tiny", example=batch, free={0: "batch"}, check=calibration)

    models = {"float": model, "plain": plain, "quantized": qmodel} | ({"file": exported.model} if exported else {})
    finish(qmodel, batch, compare(models, test, qmodel.config.DEVICE), options, exported)


if __name__ == "__main__":
    main()
