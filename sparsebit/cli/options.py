"""The options that verbs share, each with its help and its reading; a value that makes no sense is a usage error."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

LARGEST_SIDE = 16_384  # pixels


class Arguments(NamedTuple):
    """What a factory is called with."""

    positional: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}  # noqa: RUF012  (a NamedTuple's default; never written to)

    def __bool__(self) -> bool:
        return bool(self.positional or self.keywords)


class Size(NamedTuple):
    """Pixels."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


class Numbers(tuple[float, ...]):
    """One number for all channels, or one for each."""


class Names(tuple[str, ...]):
    """Names of inputs or outputs, in order."""


def read_arguments(text: str) -> Arguments:
    """`["resnet18"]` or `{"num_classes": 10}`."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(
            f"not valid JSON ({error}); write '{{\"num_classes\": 10}}' or '[\"resnet18\"]'"
        ) from None
    if isinstance(value, list):
        return Arguments(tuple(value))
    if isinstance(value, dict):
        return Arguments((), value)
    raise typer.BadParameter(
        f"{text} is neither a JSON object (keyword arguments) nor a JSON list (positional arguments)"
    )


def read_size(text: str) -> Size:
    """`224`, or `192x320` (height x width)."""
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text.strip().lower())
    if not match:
        raise typer.BadParameter(f"{text!r} is no size in pixels; write 224, or 192x320 (height x width)")
    size = Size(int(match[1]), int(match[2] or match[1]))
    if max(size) > LARGEST_SIDE:
        raise typer.BadParameter(f"{text}: more than {LARGEST_SIDE:,} pixels a side; write what the model takes: 224")
    return size


def read_mean(text: str) -> Numbers:
    numbers = _read_numbers(text)
    if any(number > 1 for number in numbers):
        raise typer.BadParameter(f"{text}: pixels count from 0 to 1 here; divide by 255: {_shrunk(numbers)}")
    return numbers


def read_std(text: str) -> Numbers:
    numbers = _read_numbers(text)
    if any(number <= 0 for number in numbers):
        raise typer.BadParameter(f"{text}: a standard deviation is above 0")
    if any(number > 2 for number in numbers):
        raise typer.BadParameter(f"{text}: pixels count from 0 to 1 here; divide by 255: {_shrunk(numbers)}")
    return numbers


def read_bits(text: str) -> tuple[int, ...]:
    """`8,4,2`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 1 <= int(part) <= 16 for part in parts):
        raise typer.BadParameter(f"{text!r} is no list of bit-widths; write numbers from 1 to 16 with commas: 8,6,4,3")
    return tuple(dict.fromkeys(map(int, parts)))


def read_names(text: str) -> Names:
    """`ids,mask`."""
    names = Names(part.strip() for part in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise typer.BadParameter(f"{text!r}: write names that differ, with commas: ids,mask")
    return names


def _read_numbers(text: str) -> Numbers:
    try:
        numbers = Numbers(float(part) for part in text.split(","))
    except ValueError:
        numbers = Numbers()
    if len(numbers) not in (1, 3):
        raise typer.BadParameter(f"{text!r}: write one number, or three with commas: 0.485,0.456,0.406")
    return numbers


def _shrunk(numbers: Numbers) -> str:
    return ",".join(f"{number / 255:.4g}" for number in numbers)


_DATA = "Data"
_FILE = "ONNX file"
_LIMITS = "Limits"
_SAY = "Output"

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="MODULE:FACTORY", help="The model: a function, class or nn.Module; '.' is on the path."
    ),
]
SourceModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODULE:FACTORY",
        help="The model that the file comes from: compare with it, or with what --against DIR makes of it.",
    ),
]
ModelArgs = Annotated[
    Arguments | None,
    typer.Option(
        "--model-args",
        metavar="JSON",
        parser=read_arguments,
        help="What the factory is called with: an object or a list.",
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option("--weights", "-w", metavar="FILE", help="A state_dict: .safetensors, or .pt without pickled objects."),
]
Config = Annotated[
    str,
    typer.Option(
        "--config", "-c", metavar="FILE|BACKEND", help="A YAML config, or a backend's name for its 8-bit default."
    ),
]
OptionalConfig = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE|BACKEND",
        help="A YAML config, or a backend's name for its 8-bit default (onnxruntime).",
    ),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N, in place of the config's DEVICE.")
]
Asym = Annotated[
    bool, typer.Option("--asym", help="Calibrate each layer behind predecessors that are already quantized (slower).")
]
Effort = Annotated[
    str | None,
    typer.Option(
        "--effort",
        metavar="fast|good|best",
        help="Calibration alone, GPTQ too (about 5 times as long), or reconstruction too (minutes).",
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume", metavar="DIR", help="Keep there what ALGORITHMS have finished; started again, go on after it."
    ),
]
Placement = Annotated[
    str,
    typer.Option(
        "--placement",
        metavar="default|measured|FILE.json",
        help="Which layers run in integers: as the backend's profile says, the fastest choice as measured in the "
        "runtime on this machine (never slower than float), or the one that was measured before.",
    ),
]
PlacementSeconds = Annotated[
    float,
    typer.Option("--placement-seconds", metavar="S", min=0, help="How long placements are tried, about."),
]
SavePlacement = Annotated[
    Path | None,
    typer.Option(
        "--save-placement", metavar="FILE.json", help="Keep the measured placement, for --placement on such machines."
    ),
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        "-d",
        metavar="SOURCE",
        help="An image folder, a .npz or .safetensors file, or MODULE:FACTORY that yields batches.",
        rich_help_panel=_DATA,
    ),
]
CalibrationData = Annotated[
    str | None,
    typer.Option(
        "--data",
        "-d",
        metavar="SOURCE",
        help="An image folder, a .npz or .safetensors file, or MODULE:FACTORY that yields batches. Weights alone (-c "
        "weights-only) need none for a folder.",
        rich_help_panel=_DATA,
    ),
]
Example = Annotated[
    str | None,
    typer.Option(
        "--data",
        "-d",
        metavar="SOURCE",
        help="Shows how the model is called, if it cannot be traced without: .npz, .safetensors or MODULE:FACTORY.",
    ),
]
ComparedData = Annotated[
    str | None,
    typer.Option(
        "--data",
        "-d",
        metavar="SOURCE",
        help="Shows how the model is called, and the file is compared on it: as in quantize.",
        rich_help_panel=_DATA,
    ),
]
ImageSize = Annotated[
    Size | None,
    typer.Option(
        "--size",
        metavar="N|HxW",
        parser=read_size,
        help="Image folder: pixels that the model takes.",
        rich_help_panel=_DATA,
    ),
]
Resize = Annotated[
    int | None,
    typer.Option(
        "--resize",
        metavar="N",
        min=1,
        max=LARGEST_SIDE,
        help="Image folder: shorter side before the centre is cut out.",
        rich_help_panel=_DATA,
    ),
]
Mean = Annotated[
    Numbers | None,
    typer.Option(
        "--mean",
        metavar="X[,X,X]",
        parser=read_mean,
        help="Images: subtracted from pixels in 0..1.",
        rich_help_panel=_DATA,
    ),
]
Std = Annotated[
    Numbers | None,
    typer.Option(
        "--std", metavar="X[,X,X]", parser=read_std, help="Images: divides after that.", rich_help_panel=_DATA
    ),
]
Gray = Annotated[
    bool, typer.Option("--gray", help="Image folder: one channel instead of three.", rich_help_panel=_DATA)
]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Samples per batch (32).", rich_help_panel=_DATA)
]
NumSamples = Annotated[
    int,
    typer.Option(
        "--num-samples", "-n", min=1, help="Samples used, evenly spread over the data.", rich_help_panel=_DATA
    ),
]
Arrays = Annotated[
    Names | None,
    typer.Option(
        "--input",
        metavar="NAME,...",
        parser=read_names,
        help="File of arrays: those that the model is given; labels and others are left out.",
        rich_help_panel=_DATA,
    ),
]
NoCheck = Annotated[
    bool,
    typer.Option(
        "--no-check", help="Do not run the file beside the simulation before it is kept.", rich_help_panel=_FILE
    ),
]


def _number_of_decibels(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value}: write a number of decibels, or --exact where no bit may differ")
    return value


Exact = Annotated[
    bool,
    typer.Option("--exact", help="A single bit that differs is a fault, at any output.", rich_help_panel=_LIMITS),
]
MinSqnr = Annotated[
    float | None,
    typer.Option(
        "--min-sqnr",
        metavar="DB",
        help="Less is a fault, at any output.",
        rich_help_panel=_LIMITS,
        callback=_number_of_decibels,
    ),
]
AllowNan = Annotated[
    bool,
    typer.Option("--allow-nan", help="Accept NaN that is on both sides.", rich_help_panel=_LIMITS),
]
DynamicBatch = Annotated[
    bool,
    typer.Option(
        "--dynamic-batch",
        help="It takes any number of samples (axis 0, named batch), not one at a time.",
        rich_help_panel=_FILE,
    ),
]
Opset = Annotated[
    int | None, typer.Option("--opset", metavar="N", min=1, help="Its ONNX opset.", rich_help_panel=_FILE)
]
InputNames = Annotated[
    Names | None,
    typer.Option(
        "--input-names",
        metavar="NAME,...",
        parser=read_names,
        help="Its inputs, in the order of forward's parameters, whose names they replace.",
        rich_help_panel=_FILE,
    ),
]
OutputNames = Annotated[
    Names | None,
    typer.Option(
        "--output-names", metavar="NAME,...", parser=read_names, help="Its outputs, in order.", rich_help_panel=_FILE
    ),
]
ExtraInfo = Annotated[
    bool,
    typer.Option(
        "--extra-info",
        help="Also write MODEL_extra.onnx, with bits and format of every site in it.",
        rich_help_panel=_FILE,
    ),
]
MinTop1 = Annotated[
    float | None,
    typer.Option(
        "--min-top1",
        metavar="SHARE",
        min=0,
        max=1,
        help="Samples with the same largest score, 0 to 1; less is a fault.",
        rich_help_panel=_LIMITS,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout, nothing else there.", rich_help_panel=_SAY)
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="The result and faults only: no progress, no remarks.", rich_help_panel=_SAY),
]
Record = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="FILE.json",
        help="Also keep what was found in this file, beside what other verbs found out about the same model.",
        rich_help_panel=_SAY,
    ),
]
