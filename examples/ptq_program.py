"""A net trained on scikit-learn's digits as a file for another runtime than ONNX Runtime.

    python examples/ptq_program.py [--export digits-int8.pte] [--json]

The ending chooses it: `.pte` ExecuTorch, `.pt2` AOTInductor, `.tflite` LiteRT, `.mlpackage` Core ML, `.onnx` Qualcomm's
HTP. The file is run and compared with the simulation before it is kept (Core ML's, only on a Mac); then the float net
and the file are scored on the same digits. Without the runtime's package the example prints how to install it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import sparsebit
from sparsebit.cli.digits import Digits, load_digits, train

BACKENDS = {
    ".pte": "executorch",
    ".pt2": "aot_inductor",
    ".tflite": "litert",
    ".mlpackage": "coreml",
    ".onnx": "qnn",
}
RUN_ELSEWHERE = {"coreml"}
BATCH = 50
FEW = 4  # batches that a simulator of a device is scored on, since it takes seconds for each


def made(file: Path, digits: Digits) -> dict[str, Any]:
    backend = BACKENDS[file.suffix]
    net = train(digits, epochs=4, seed=0)
    batches = list(digits.train_images[: 8 * BATCH].split(BATCH))
    qmodel = sparsebit.quantize(net, batches, backend)
    parity = qmodel.export(file, batches[0], check=None if backend in RUN_ELSEWHERE else batches[:2])
    parts = [file, *file.rglob("*")] if file.is_dir() else [file]
    record: dict[str, Any] = {"file": str(file), "bytes": sum(part.stat().st_size for part in parts if part.is_file())}
    if parity is None:
        return record
    record["parity"] = str(parity)
    images, labels = digits.test_images, digits.test_labels
    whole = FEW * BATCH if backend == "qnn" else len(images) // BATCH * BATCH
    session = sparsebit.open_session(file, backend, num_threads=1)
    outputs = [session.run({session.inputs[0]: part.numpy()})[0] for part in images[:whole].split(BATCH)]
    with torch.no_grad():
        answers = {"float": net(images[:whole]), "file": torch.cat([torch.from_numpy(part) for part in outputs])}
    record["scores"] = {
        name: 100 * float((found.argmax(1) == labels[:whole]).float().mean()) for name, found in answers.items()
    }
    record["audit"] = sparsebit.audit(file, runtime=backend).verdict
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, default=Path("digits-int8.pte"), metavar="FILE")
    parser.add_argument("--json", action="store_true", help="a record on stdout")
    asked = parser.parse_args()
    if asked.export.suffix not in BACKENDS:
        parser.error(f"--export {asked.export}: allowed endings: {', '.join(BACKENDS)}")
    try:
        record = made(asked.export, load_digits())
    except ImportError as error:
        record = {"skipped": str(error)}
    print(json.dumps(record) if asked.json else "\n".join(f"{key}: {value}" for key, value in record.items()))


if __name__ == "__main__":
    main()
