"""`sparsebit demo`: a small network, trained on the spot, quantized to fewer and fewer bits, and exported.

Training, calibration and profile use the training images only; the test images are used for nothing but the scores.
`_sweep` makes the rows of the table: float, each number of bits, and the fewest bits with the worst layers at 8.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

import sparsebit
from sparsebit.cli.digits import Digits, load_digits, train
from sparsebit.cli.outputs.onnx_output import PACKAGES, require
from sparsebit.cli.outputs.output import Output, decibel, facts_table, kilobytes, table
from sparsebit.cli.outputs.output_names import check_onnx_name
from sparsebit.cli.outputs.recording import Recording
from sparsebit.cli.outputs.size import weight_size
from sparsebit.cli.verb_options import DemoOptions
from sparsebit.cli.verbs.audit import size_words, time_words
from sparsebit.cli.verbs.profile import as_record, error_table
from sparsebit.deploy.audit.audit_file import audit
from sparsebit.deploy.comparing.parity import Parity, decibels
from sparsebit.deploy.onnx_graph.model_file import checked_path, need_own
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.quantization import QuantModel
from sparsebit.records import Coverage, LayerError
from sparsebit.records.audit import Audit

_PROFILED_BITS = 4  # the worst layers are shown at these bits
_NUM_RAISED = 3  # this many of them get 8 bits in the last row
_NUM_SHOWN = 5
_NUM_CALIBRATION = 256


@dataclass(frozen=True)
class DemoRow:
    """One way to quantize and its result. `raised`: layers with 8 bits; None: not applicable to the float model."""

    bits: int
    accuracy: float
    agreement: float | None
    sqnr_db: float | None
    weight_bytes: int
    ratio: float
    raised: tuple[str, ...] = ()


def demo(asked: DemoOptions, out: Output, recorded: Recording) -> None:
    """Train, quantize at each number of bits, export, and report."""
    if asked.output is not None:
        check_onnx_name(asked.output)
    kept = None if asked.output is None else checked_path(asked.output.expanduser())
    require(*PACKAGES, BACKEND, extra="demo")
    if kept is not None:
        need_own(kept, "give another name, or remove it")
    digits = load_digits()
    num_threads = torch.get_num_threads()
    # On 8x8 images more threads gain little, and one thread adds in a fixed order: every run prints the same numbers.
    torch.set_num_threads(1)
    try:
        out.remark(f"training a small CNN on {len(digits.train_images):,} handwritten digits (about 20 seconds) ...")
        start = time.monotonic()
        model = train(digits, epochs=asked.epochs, seed=asked.seed)
        trained = time.monotonic() - start
        # Calibration and profile use training images only: test images are only used for testing.
        batches = list(digits.train_images[:_NUM_CALIBRATION].split(64))
        rows, worst, coverage = _sweep(model, digits, batches, asked.bits)
        out.remark("writing the 8-bit network as an ONNX file, and running that (about 10 seconds) ...")
        with _place(kept) as target:
            file = export_file(model, digits, batches, target)
    finally:
        torch.set_num_threads(num_threads)
    record = {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_train_images": len(digits.train_images),
        "num_calibration_images": _NUM_CALIBRATION,
        "num_test_images": len(digits.test_images),
        "training_seconds": trained,
        "seconds": time.monotonic() - start,
        "float": asdict(rows[0]),
        "quantized": [asdict(row) for row in rows[1:]],
        "worst_layers": {"bits": _PROFILED_BITS, "layers": [as_record(error) for error in worst]},
        "onnx": file.to_dict(kept),
    }
    facts = facts_table(file.facts(kept, len(digits.test_images)))
    out.result(record, *_shown(record, rows, error_table(worst[:_NUM_SHOWN], coverage), facts))


@contextlib.contextmanager
def _place(kept: Path | None) -> Iterator[Path]:
    """The path of the file: the one that the user gave, or one in a temporary folder."""
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="sparsebit-demo-") as folder:
        yield Path(folder) / NAME


def recommended(bits: int, raised: tuple[str, ...] = ()) -> dict[str, Any]:
    """The config that this demo recommends for CNNs at few bits; the `raised` layers keep 8."""
    tensor = {
        "QUANTIZER": {"TYPE": "uniform", "BIT": bits},
        "OBSERVER": {"TYPE": "mse"},
        "SPECIFIC": [{layer: ["QUANTIZER.BIT", 8]} for layer in raised],
    }
    return {
        "BACKEND": "virtual",
        "DEVICE": "cpu",
        "SCHEDULE": {"FUSE_BN": True},
        "W": {"QSCHEME": "per-channel-symmetric", **tensor},
        "A": {"QSCHEME": "per-tensor-affine", **tensor},
    }


def _sweep(
    model: nn.Module, digits: Digits, batches: list[Tensor], bits: tuple[int, ...]
) -> tuple[list[DemoRow], list[LayerError], Coverage]:
    """A row for float, for every bit-width and for the worst layers raised; then the layers, worst first."""
    with torch.no_grad():
        reference = model(digits.test_images)

    def judged(qmodel: QuantModel, width: int, raised: tuple[str, ...] = ()) -> DemoRow:
        with torch.no_grad():
            logits = qmodel(digits.test_images)
        sqnr = decibels(float(reference.square().sum()), float((logits - reference).square().sum()))
        same = _same(logits, digits.test_labels), _same(logits, reference.argmax(1))
        size = weight_size(qmodel)
        return DemoRow(width, *same, sqnr, size.quantized_bytes, size.ratio, raised)

    def quantized(width: int, raised: tuple[str, ...] = ()) -> QuantModel:
        return sparsebit.quantize(model, batches, recommended(width, raised))

    profiled = quantized(_PROFILED_BITS)
    worst = list(profiled.profile(batches, histograms=False).layers)
    rows = [DemoRow(32, _same(reference, digits.test_labels), None, None, weight_size(profiled).float_bytes, 1.0)]
    rows += [judged(profiled if width == _PROFILED_BITS else quantized(width), width) for width in bits]
    if min(bits) < 8:
        raised = tuple(error.layer for error in worst[:_NUM_RAISED])
        rows.append(judged(quantized(min(bits), raised), min(bits), raised))
    return rows, worst, profiled.coverage


def _same(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(1) == labels).double().mean())


def _shown(record: dict[str, Any], rows: list[DemoRow], worst: Table, facts: Table) -> list[RenderableType]:
    num_test = record["num_test_images"]
    head = Text.assemble(
        ("Handwritten digits, 8x8 pixels", "bold"),
        f": a CNN of {record['num_parameters']:,} parameters (batch norms, residual adds, a depthwise convolution), "
        f"trained here on {record['num_train_images']:,} images in {record['training_seconds']:.0f} s, calibrated on "
        f"{record['num_calibration_images']} of them, judged on {num_test} images that it never saw "
        f"(one image is {100 / num_test:.2f} points).",
    )
    notes = (
        "Weights and activations have the same bits, simulated in float (backend virtual): per-channel symmetric "
        "weights, per-tensor affine activations, batch norms folded, MSE observer. Size: weights packed into their "
        "bits, with their float scales and biases."
    )
    if raised := rows[-1].raised:
        notes = f"* {', '.join(raised)}, the worst layers below, keep 8 bits; all others have {rows[-1].bits}.\n{notes}"
    following = (
        'Your own model: sparsebit quantize --help, or sparsebit.quantize(model, batches, "onnxruntime") in Python.'
    )
    title = Text(f"The layers that lose most at {_PROFILED_BITS} bits, each quantized alone", style="bold")
    file = Text("The 8-bit network as an ONNX file, run in ONNX Runtime", style="bold")
    shown: list[RenderableType] = [Padding(head, (1, 0, 0, 0)), _table(rows), Text(notes, style="dim")]
    return [*shown, "", title, worst, file, Padding(facts, (1, 0)), following]


def _table(rows: list[DemoRow]) -> Table:
    columns = ("bits", "accuracy", "same answer as float", "output SQNR", "weights", "smaller")
    found: list[list[str | Text]] = []
    for row in rows:
        accuracy = Text(f"{row.accuracy:.1%}", style=_colour(rows[0].accuracy - row.accuracy))
        if row.agreement is None or row.sqnr_db is None:
            found.append(["float", accuracy, "", "", kilobytes(row.weight_bytes), ""])
        else:
            name = f"{row.bits} + 8 *" if row.raised else str(row.bits)
            cells = f"{row.agreement:.1%}", decibel(row.sqnr_db), kilobytes(row.weight_bytes), f"{row.ratio:.1f}x"
            found.append([name, accuracy, *cells])
    return table(columns, found, numbers=columns[1:])


def _colour(loss: float) -> str:
    return "green" if loss < 0.01 else "yellow" if loss < 0.05 else "red"


# --- the network at 8 bits as an ONNX file


NAME = "sparsebit-demo.onnx"
BACKEND = "onnxruntime"
_TIMED_S = 2.0


@dataclass(frozen=True)
class DemoFile:
    """The file in ONNX Runtime. `agreement`: with the float model's answers."""

    parity: Parity
    audit: Audit
    accuracy: float
    agreement: float

    def to_dict(self, kept: Path | None) -> dict[str, Any]:
        found = self.audit
        return {
            "file": kept and str(kept),
            "bytes": found.num_bytes,
            "float_bytes": found.float_bytes,
            "accuracy": self.accuracy,
            "agreement": self.agreement,
            "parity": self.parity.to_dict(),
            "latency": {name: latency.to_dict() for name, latency in found.latency.items()},
            "ratio": found.ratio,
            "verdict": found.verdict,
        }

    def facts(self, kept: Path | None, num_test: int) -> dict[str, str]:
        return {
            "file": str(kept or f"not kept: --output {NAME} keeps it"),
            "parity": str(self.parity),
            "accuracy": f"{self.accuracy:.1%} on the {num_test} images, {self.agreement:.1%} the same answer as float",
            "size": size_words(self.audit),
            "speed": f"one image: {time_words(self.audit)}",
            "runs": self.audit.verdict,
        }


def export_file(model: nn.Module, digits: Digits, batches: list[torch.Tensor], target: Path) -> DemoFile:
    """Quantize for ONNX Runtime, write `target` and run it: against the simulation, the labels and the clock."""
    qmodel = sparsebit.quantize(model, batches, BACKEND)
    parity = qmodel.export_onnx(batches[0], target, dynamic_axes={"images": {0: "batch"}}, check=batches)
    assert parity is not None
    images, labels = digits.test_images, digits.test_labels
    (logits,) = open_session(target, BACKEND, num_threads=1).run({"images": images.numpy()})
    answers = torch.from_numpy(logits).argmax(1)
    with torch.no_grad():
        agreement = float((answers == model(images).argmax(1)).double().mean())
    found = audit(target, feeds={"images": images[:1].numpy()}, budget_s=_TIMED_S)
    return DemoFile(parity, found, float((answers == labels).double().mean()), agreement)
