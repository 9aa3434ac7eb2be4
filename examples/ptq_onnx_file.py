"""A float ONNX file of any exporter, quantized for ONNX Runtime without its PyTorch code.

    python examples/ptq_onnx_file.py [float.onnx --data calibration.npz]

Without a file it trains a small net on scikit-learn's digits, exports it in float as any program would, and begins with
that file: load_onnx compares the module with ONNX Runtime; the float file and the int8 file are scored on the same
digits. With a file, `--data` holds an array for each of its inputs, and the outputs of both files are compared.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sparsebit
from sparsebit.cli.digits import Digits, load_digits, train

BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="a float ONNX file; default: one of a net trained on digits")
    parser.add_argument("--data", type=Path, help="arrays by the names of the file's inputs: .npz")
    parser.add_argument("--batch-size", type=int, default=BATCH)
    parser.add_argument("--effort", default="fast", choices=("fast", "good", "best"))
    parser.add_argument("--export", type=Path, default=Path("from-onnx-int8.onnx"), metavar="FILE")
    parser.add_argument("--json", action="store_true", help="a record on stdout")
    asked = parser.parse_args()
    digits = None
    if asked.file is None:
        digits = load_digits()
        asked.file = asked.export.with_name("digits-float.onnx")
        export_float(digits, asked.file)
        arrays = {"images": digits.train_images.numpy()}
    else:
        if asked.data is None:
            parser.error("give --data with a file of your own")
        arrays = dict(np.load(asked.data))
    names = sparsebit.open_session(asked.file).inputs
    batches = split(arrays, names, asked.batch_size)

    model = sparsebit.load_onnx(asked.file, batches)
    qmodel = sparsebit.quantize(model, batches, "onnxruntime", effort=asked.effort)
    parity = qmodel.export_onnx(
        batches[0], asked.export, check=batches[:2], input_names=list(names), dynamic_axes={name: [0] for name in names}
    )

    record: dict[str, Any] = {"file": str(asked.export), "parity": str(parity)}
    record["layers"] = [name for name, module in model.named_modules() if hasattr(module, "weight")]
    record["bytes"] = {"float": asked.file.stat().st_size, "int8": asked.export.stat().st_size}
    files = {"float": asked.file, "int8": asked.export}
    if digits is not None:
        record["scores"] = {name: accuracy(file, digits) for name, file in files.items()}
    else:
        wanted, found = (outputs(file, batches[0]) for file in files.values())
        record["sqnr_db"] = float(10 * np.log10((wanted**2).sum() / ((wanted - found) ** 2).sum()))
    print(json.dumps(record) if asked.json else "\n".join(f"{key}: {value}" for key, value in record.items()))


def export_float(digits: Digits, file: Path) -> None:
    """The file that stands for one of your own: from here on the net is not used."""
    net, images = train(digits, epochs=4, seed=0), digits.test_images[:2]
    free = ({0: "batch"},)
    torch.onnx.export(
        net,
        (images,),
        file,
        input_names=["images"],
        dynamo=True,
        dynamic_shapes=free,
        external_data=False,
        verbose=False,
    )


def split(arrays: dict[str, Any], inputs: tuple[str, ...], size: int) -> list[tuple[Tensor, ...]]:
    """The arrays in the order of the file's inputs, in batches of one size."""
    tensors = [torch.from_numpy(arrays[name]) for name in inputs]
    whole = len(tensors[0]) // size * size
    return [tuple(one[start : start + size] for one in tensors) for start in range(0, whole, size)][:8]


def accuracy(file: Path, digits: Digits) -> float:
    """Percent of the test images that the file names rightly."""
    found = outputs(file, (digits.test_images,))
    return 100 * float((torch.from_numpy(found).argmax(1) == digits.test_labels).float().mean())


def outputs(file: Path, batch: tuple[Tensor, ...]) -> Any:
    session = sparsebit.open_session(file)
    return session.run({name: one.numpy() for name, one in zip(session.inputs, batch, strict=True)})[0]


if __name__ == "__main__":
    main()
