"""CIFAR-10, step by step: the verbs of `QuantModel` on ResNet-20, MobileNetV2 or a small ViT, up to the ONNX file.

    python examples/ptq_cifar10.py --model mobilenetv2
    python examples/ptq_cifar10.py --config examples/configs/resnet20_w4a8.yaml

`sparsebit.quantize` does the same in one call; the verbs are for those who want a say in between. The last column of
the table is the file itself, run by ONNX Runtime on the test images.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cifar_networks
import numpy as np
import torch
from common import CONFIGS, arguments, existing, export, finish
from public_data import cifar10
from torch import Tensor, nn

from sparsebit.quantization import QuantModel, parse_qconfig

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation per color


def load_model(folder: Path, name: str) -> tuple[nn.Module, Normalisation]:
    """The float model, and how its inputs are normalised. A machine without weights trains them first, for minutes."""
    if not (folder / "models" / "cifar_models.py").is_file():
        return cifar_networks.trained(name, cifar10(folder)[0], folder / "models"), (
            cifar_networks.MEAN,
            cifar_networks.STD,
        )
    sys.path.insert(0, str(folder / "models"))
    import cifar_models  # longer trained architectures, beside their weights

    imagenet = cifar_models.RESNET20_MEAN, cifar_models.RESNET20_STD
    return cifar_models.load(name), imagenet if name == "resnet20" else (cifar_models.MEAN, cifar_models.STD)


def load_images(file: Path, normalisation: Normalisation, limit: int | None) -> tuple[Tensor, Tensor]:
    archive = np.load(existing(file))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in normalisation)
    images = torch.from_numpy(archive["images"][:limit]).permute(0, 3, 1, 2).float() / 255
    return (images - mean) / std, torch.from_numpy(archive["labels"][:limit].astype(np.int64))


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, device: str) -> float:
    predicted = torch.cat([model(batch.to(device)).argmax(1).cpu() for batch in images.split(250)])
    return 100 * float((predicted == labels).float().mean())


def main() -> None:
    parser = arguments(__doc__, limit="images", config=str(CONFIGS / "cifar10_w8a8.yaml"))
    parser.add_argument("--model", choices=("resnet20", "mobilenetv2", "vit"), default="resnet20")
    options = parser.parse_args()
    folder = options.data / "cifar10"
    model, normalisation = load_model(folder, options.model)
    train_file, test_file = cifar10(folder)
    calibration, _ = load_images(train_file, normalisation, min(256, options.limit or 256))
    images, labels = load_images(test_file, normalisation, options.limit)

    config = parse_qconfig(options.config)
    qmodel = QuantModel(model, config).to(config.DEVICE)
    batches = calibration.split(64)
    # Forwards between these two verbs gather statistics; nothing is quantized yet, and no activation is kept.
    qmodel.prepare_calibration()
    with torch.no_grad():
        for batch in batches:
            qmodel(batch.to(config.DEVICE))
    qmodel.calc_qparams()

    def top1(candidate: nn.Module) -> dict[str, float]:
        return {"top-1 %": accuracy(candidate, images, labels, config.DEVICE)}

    scores = {"float": top1(model.to(config.DEVICE))}
    # The switches are independent: w_quant alone shows what the weights cost.
    qmodel.set_quant(w_quant=True, a_quant=False)
    scores["weights alone"] = top1(qmodel)
    qmodel.set_quant(w_quant=True, a_quant=True)
    scores["quantized"] = top1(qmodel)
    exported = export(qmodel, options, options.model, example=batches[0], free={0: "batch"}, check=batches)
    if exported is not None:
        scores["file"] = top1(exported.model)
    finish(qmodel, batches[0], scores, options, exported)


if __name__ == "__main__":
    main()
