"""CIFAR-10 under a goal: one call finds the best file that keeps it, and says why.

    python examples/compress_cifar10.py --model mobilenetv2 --minutes 10
    python examples/compress_cifar10.py --bytes 0.12           # the most accurate file of 12 % of the bytes

Half of the test images select among the candidates; the accuracy at the end is that of the others. The same command
with the same --folder continues a run that was stopped. `sparsebit report FOLDER` makes a page of it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from common import DATA
from ptq_cifar10 import load_images, load_model
from public_data import cifar10
from rich.console import Console
from rich.table import Table

import sparsebit
from sparsebit.compress import Result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("resnet20", "mobilenetv2", "vit"), default="resnet20")
    parser.add_argument("--max-loss", type=float, help="points of accuracy (0.5, unless --bytes is given)")
    parser.add_argument("--bytes", type=float, help="a share of the float file's bytes")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to search (%(default)g)")
    parser.add_argument("--folder", type=Path, default=Path("compressed"), help="the run's folder (%(default)s)")
    parser.add_argument("--data", type=Path, default=DATA, help="the data folder (%(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="a quick look: at most N images")
    parser.add_argument("--json", action="store_true", help="a record on stdout; the table then goes to stderr")
    options = parser.parse_args()
    model, normalisation = load_model(options.data / "cifar10", options.model)
    train_file, test_file = cifar10(options.data / "cifar10")
    calibration, _ = load_images(train_file, normalisation, min(256, options.limit or 256))
    images, labels = load_images(test_file, normalisation, options.limit)

    result = sparsebit.compress(
        model,
        list(calibration.split(64)),
        folder=options.folder,
        metric="top1",
        validation=list(zip(images.split(64), labels.split(64), strict=True)),
        max_loss=0.5 if options.max_loss is None and options.bytes is None else options.max_loss,
        budget=None if options.bytes is None else {"bytes": options.bytes},
        minutes=options.minutes,
    )
    console = Console(stderr=options.json)
    console.print(ladder_table(result))
    console.print(str(result))
    console.print(f"file: {result.file}; a page about the run: sparsebit report {options.folder}")
    if options.json:
        print(json.dumps({"met": result.met, "file": str(result.file), "ladder": result.ladder.to_json()}))


def ladder_table(result: Result) -> Table:
    """What was tried; a star marks the best."""
    ladder = result.ladder
    table = Table("", "step", "result", "loss in points", "time of float", "bytes of float", title=ladder.goal.metric)
    for step in ladder.steps:
        judged, cost = step.final or step.selection, step.cost
        table.add_row(
            "*" if step.name == ladder.best else "",
            step.name,
            step.verdict,
            "" if judged is None else f"{judged.loss:.2f} ± {judged.bound or 0:.2f}",
            "" if cost is None or cost.latency is None else f"{cost.latency:.2f}",
            "" if cost is None else f"{cost.bytes_ratio:.3f}",
        )
    return table


if __name__ == "__main__":
    main()
