"""`sparsebit demo`: a small network trained on the spot, quantized to fewer and fewer bits, and what that costs."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebit.cli import options
from sparsebit.cli.output import decibel, kilobytes, speaking

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from torch import Tensor, nn

    from sparsebit.cli.digits import Digits
    from sparsebit.quantization import QuantModel
    from sparsebit.records import LayerError

_PROFILED_BITS = 4  # the worst layers are shown at these bits
_NUM_RAISED = 3  # ... and so many of them get 8 bits in the last row
_NUM_CALIBRATION = 256


@dataclass(frozen=True)
class Row:
    """One way to quantize and what came out. `raised`: layers that have 8 bits; None: not asked of the float model."""

    bits: int
    accuracy: float
    agreement: float | None
    sqnr_db: float | None
    weight_bytes: int
    ratio: float
    raised: tuple[str, ...] = ()


def demo(
    bits: Annotated[
        Any,
        typer.Option(
            "--bits", metavar="N,N,...", parser=options.read_bits, help="Bit-widths of weights and activations."
        ),
    ] = "8,6,4,3",
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the training images.")] = 15,
    seed: Annotated[int, typer.Option("--seed", help="Another network.")] = 0,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train a small CNN on handwritten digits and quantize it at 8, 6, 4 and 3 bits: about a minute, nothing to download.

    The accuracy is that on images which were used neither for training nor for calibration.
    """
    with speaking(as_json=json, quiet=quiet) as out:
        import torch

        from sparsebit.cli.digits import load_digits, train

        digits = load_digits()
        num_threads = torch.get_num_threads()
        # On 8x8 images threads gain little, and with one the sums, hence the figures, are the same on every run.
        torch.set_num_threads(1)
        try:
            out.remark(
                f"training a small CNN on {len(digits.train_images):,} handwritten digits (about 20 seconds) ..."
            )
            start = time.monotonic()
            model = train(digits, epochs=epochs, seed=seed)
            trained = time.monotonic() - start
            rows, worst = _sweep(model, digits, bits)
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
            "worst_layers": {"bits": _PROFILED_BITS, "layers": [asdict(error) for error in worst]},
        }
        out.result(record, *_shown(record, rows, worst))


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


def _sweep(model: nn.Module, digits: Digits, bits: tuple[int, ...]) -> tuple[list[Row], list[LayerError]]:
    """A row for float and for every bit-width, one with the worst layers raised, and the worst layers themselves."""
    import torch

    import sparsebit
    from sparsebit.cli.profile import layer_errors
    from sparsebit.cli.size import weight_size
    from sparsebit.cli.trial import decibels

    # Calibration and profile see training images only: the test images judge, and do nothing else.
    batches = list(digits.train_images[:_NUM_CALIBRATION].split(64))
    with torch.no_grad():
        reference = model(digits.test_images)

    def judged(qmodel: QuantModel, width: int, raised: tuple[str, ...] = ()) -> Row:
        with torch.no_grad():
            logits = qmodel(digits.test_images)
        noise = (logits - reference).square().sum()
        size = weight_size(qmodel)
        return Row(
            width,
            _same(logits, digits.test_labels),
            _same(logits, reference.argmax(1)),
            decibels(float(reference.square().sum()), float(noise)),
            size.quantized_bytes,
            size.ratio,
            raised,
        )

    def quantized(width: int, raised: tuple[str, ...] = ()) -> QuantModel:
        return sparsebit.quantize(model, batches, recommended(width, raised))

    profiled = quantized(_PROFILED_BITS)
    worst = layer_errors(profiled, batches)
    rows = [Row(32, _same(reference, digits.test_labels), None, None, weight_size(profiled).float_bytes, 1.0)]
    rows += [judged(profiled if width == _PROFILED_BITS else quantized(width), width) for width in bits]
    if min(bits) < 8:
        raised = tuple(error.layer for error in worst[:_NUM_RAISED])
        rows.append(judged(quantized(min(bits), raised), min(bits), raised))
    return rows, worst


def _same(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(1) == labels).double().mean())


def _shown(record: dict[str, Any], rows: list[Row], worst: list[LayerError]) -> list[RenderableType]:
    from rich.text import Text

    num_test = record["num_test_images"]
    head = Text.assemble(
        ("\nHandwritten digits, 8x8 pixels", "bold"),
        f": a CNN of {record['num_parameters']:,} parameters (batch norms, residual adds, a depthwise convolution), "
        f"trained here on {record['num_train_images']:,} images in {record['training_seconds']:.0f} s, calibrated on "
        f"{record['num_calibration_images']} of them, judged on {num_test} images that it never saw "
        f"(one image is {100 / num_test:.2f} points).",
    )
    raised = ", ".join(rows[-1].raised)
    notes = (
        [f"* the {_NUM_RAISED} worst layers below keep 8 bits ({raised}), all others have {rows[-1].bits}."]
        if raised
        else []
    )
    notes.append(
        "Bits are those of weights and activations alike, simulated in float (backend virtual; per-channel symmetric weights, "
        "per-tensor affine activations, batch norms folded, MSE observer). Weights: packed into their bits, with float scales "
        "and biases."
    )
    return [head, _table(rows), *(Text(note, style="dim") for note in notes), _worst_table(worst), _NEXT]


_NEXT = 'Your own model: sparsebit quantize --help, or sparsebit.quantize(model, batches, "onnxruntime") in Python.'


def _table(rows: list[Row]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("bits", "accuracy", "same answer as float", "output SQNR", "weights", "smaller"):
        table.add_column(column, justify="left" if column == "bits" else "right")
    best = rows[0].accuracy
    for row in rows:
        name = "float" if row.agreement is None else f"{row.bits} + 8 *" if row.raised else str(row.bits)
        style = (
            "bold"
            if row.agreement is None
            else "green"
            if row.accuracy > best - 0.01
            else "yellow"
            if row.accuracy > best - 0.05
            else "red"
        )
        table.add_row(
            name,
            f"[{style}]{row.accuracy:.1%}[/]",
            "" if row.agreement is None else f"{row.agreement:.1%}",
            "" if row.sqnr_db is None else decibel(row.sqnr_db),
            kilobytes(row.weight_bytes),
            "" if row.agreement is None else f"{row.ratio:.1f}x",
        )
    return table


def _worst_table(worst: list[LayerError]) -> Table:
    from sparsebit.cli.profile import error_table
    from sparsebit.records import Coverage

    title = f"The layers that lose most at {_PROFILED_BITS} bits, each quantized alone"
    return error_table(worst[:5], Coverage(), title)
