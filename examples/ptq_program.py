"""A net trained on scikit-learn's digits as a program for ExecuTorch (.pte) or AOTInductor (.pt2).

    python examples/ptq_program.py [--export digits-int8.pte] [--json]

The ending chooses the runtime. The file is run there and compared with the simulation before it is kept; then the float
net and the file are scored on the same digits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import sparsebit
from sparsebit.cli.digits import load_digits, train

BACKENDS = {".pte": "executorch", ".pt2": "aot_inductor"}
BATCH = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, default=Path("digits-int8.pte"), metavar="FILE")
    parser.add_argument("--json", action="store_true", help="a record on stdout")
    asked = parser.parse_args()
    if asked.export.suffix not in BACKENDS:
        parser.error(f"--export {asked.export}: allowed endings: {', '.join(BACKENDS)}")
    backend = BACKENDS[asked.export.suffix]
    digits = load_digits()
    net = train(digits, epochs=4, seed=0)
    batches = list(digits.train_images[: 8 * BATCH].split(BATCH))

    qmodel = sparsebit.quantize(net, batches, backend)
    parity = qmodel.export(asked.export, batches[0], check=batches[:2])

    session = sparsebit.open_session(asked.export, backend, num_threads=1)
    images, labels = digits.test_images, digits.test_labels
    whole = len(images) // BATCH * BATCH
    outputs = [session.run({session.inputs[0]: part.numpy()})[0] for part in images[:whole].split(BATCH)]
    with torch.no_grad():
        answers = {"float": net(images[:whole]), "file": torch.cat([torch.from_numpy(part) for part in outputs])}
    record: dict[str, Any] = {"file": str(asked.export), "bytes": asked.export.stat().st_size, "parity": str(parity)}
    record["scores"] = {
        name: 100 * float((found.argmax(1) == labels[:whole]).float().mean()) for name, found in answers.items()
    }
    record["audit"] = sparsebit.audit(asked.export).verdict
    print(json.dumps(record) if asked.json else "\n".join(f"{key}: {value}" for key, value in record.items()))


if __name__ == "__main__":
    main()
