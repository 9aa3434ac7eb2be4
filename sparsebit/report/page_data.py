"""The content of a page as plain values, the same for quantized, pruned and language models and for ONNX files.

None, an empty text and an empty tuple mean that no record has the fact; the page hides it. The page's script
(`assets/page.js`) reads these fields by name, so a renamed field is renamed there too. Numbers are rounded to four
digits, and histograms are written as one character per bin: a page has at most 400 kB, and 1 kB for each layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sparsebit.records.error_profile import ValueHistogram

# A histogram's bins as characters: the first is an empty bin, the last the fullest; the page shows the same heights.
HEIGHTS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
EXACT_DB = 999.0  # an infinite SQNR: JSON has no infinity


@dataclass(frozen=True)
class Card:
    """One of the numbers at the top. `share`: of `before`; `is_good`: None if the goal says nothing about it."""

    label: str
    value: str
    before: str = ""
    share: float | None = None
    is_good: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Step:
    """One rung of a ladder. `latency`, `bytes`, `macs`: shares of the float file's. `recipe`: texts by file name.

    `bits`: of a weight of a language model, with its scales.
    """

    name: str
    rung: str
    why: str
    verdict: str
    seconds: float
    loss: float | None = None
    bound: float | None = None
    unit: str = ""
    num_samples: int | None = None
    latency: float | None = None
    bytes: float | None = None
    macs: float | None = None
    bits: float | None = None
    parity: str = ""
    fault: str = ""
    recipe: dict[str, str] | None = None
    is_best: bool = False
    is_pareto: bool = False


@dataclass(frozen=True)
class Bins:
    """A histogram: bin `i` starts at `low + i * width`. `heights`: a character of `HEIGHTS` per bin, by square root."""

    low: float
    width: float
    heights: str


@dataclass(frozen=True)
class Levels:
    """Values in ascending order: the ends, and a character of `HEIGHTS` for each, its share of the largest."""

    low: float
    high: float
    heights: str


@dataclass(frozen=True)
class Tensor:
    """One quantized tensor of a layer. `role`: `weight`, `input`, `output`, ... `low`, `high`: the float extremes.

    `clip_low`, `clip_high`: the chosen range; `clipped`: the share outside of it. `scales`, `peaks`: sorted, at most
    64: the scales, and the largest absolute value of each channel.
    """

    role: str
    format: str
    bits: int | None = None
    num_scales: int | None = None
    sqnr_db: float | None = None
    low: float | None = None
    high: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    clipped: float | None = None
    observer: str = ""
    scales: tuple[float, ...] = ()
    peaks: tuple[float, ...] = ()
    float_bins: Bins | None = None
    quantized_bins: Bins | None = None


@dataclass(frozen=True)
class Cause:
    """A likely reason for a layer's error or time, in a sentence, and what to try."""

    text: str
    remedy: str = ""


Arithmetic = Literal["integer", "weight-only", "float", "unknown", ""]


@dataclass(frozen=True)
class Layer:
    """`bits`: of the weight, else of the activation. `sqnr_db`: of the output. `ms`, `float_ms`: here and in float.

    `inputs`: indices of the layers whose results it reads. `why_float`: the reason if it is not computed in integers.
    `float_bytes`: before. `kept`: the share of the weight that pruning left.
    """

    name: str
    op: str = ""
    arithmetic: Arithmetic = ""
    bits: float | None = None
    activation_bits: float | None = None
    sqnr_db: float | None = None
    bytes: int | None = None
    float_bytes: int | None = None
    kept: float | None = None
    macs: int | None = None
    ms: float | None = None
    float_ms: float | None = None
    kernel: str = ""
    shape: str = ""
    why_float: str = ""
    remedy: str = ""
    inputs: tuple[int, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    causes: tuple[Cause, ...] = ()

    def replace(self, **changes: Any) -> Layer:
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Table:
    """Further facts as a table; a cell is a text or a number."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Box:
    """A module's place in the drawing, which holds its layers and modules. `parent`: its index; -1 for the drawing."""

    name: str
    parent: int
    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True)
class Drawing:
    """Boxes of modules, outer ones first; for each layer its box and its place. `title`: the room above parts."""

    boxes: tuple[Box, ...]
    box_of: tuple[int, ...]
    x: tuple[int, ...]
    y: tuple[int, ...]
    layer_width: int
    layer_height: int
    title: int


@dataclass(frozen=True)
class Run:
    """One model or file. `met`: whether it keeps the goal; None without a goal. `reproduce`: how to make it again.

    `cost_name`: what of a step the plot shows, `latency`, `bytes`, `macs` or `bits`; `max_cost`: its limit.
    """

    name: str
    kind: str
    cards: tuple[Card, ...] = ()
    goal: str = ""
    met: bool | None = None
    reason: str = ""
    reproduce: str = ""
    steps: tuple[Step, ...] = ()
    cost_name: str = "bytes"
    max_loss: float | None = None
    max_cost: float | None = None
    layers: tuple[Layer, ...] = ()
    drawing: Drawing | None = None
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()

    def replace(self, **changes: Any) -> Run:
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Page:
    """All runs of a page; with several, they are compared by the names of their layers."""

    title: str
    version: str
    runs: tuple[Run, ...]


def plain(value: Any) -> Any:
    """The value as JSON without absent fields; numbers have four digits."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, Tensor):
            given |= {"scales": levels(value.scales), "peaks": levels(value.peaks)}
        pairs = ((name, plain(item)) for name, item in given.items())
        return {name: item for name, item in pairs if item is not None and item not in ("", [], {})}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return _rounded(value) if isinstance(value, float) else value


def bins(found: ValueHistogram | None) -> Bins | None:
    """A record's histogram in short form."""
    if found is None or not found.counts:
        return None
    most, last = max(found.counts), len(HEIGHTS) - 1
    # A square root, because the tails that decide the range are a thousandth of the fullest bin.
    heights = (math.ceil(last * math.sqrt(count / most)) if most else 0 for count in found.counts)
    return Bins(found.low, found.width, "".join(HEIGHTS[height] for height in heights))


def levels(values: Sequence[float]) -> Levels | None:
    """Sorted values in short form; None for fewer than two, which have no shape."""
    if len(values) < 2:
        return None
    last, most = len(HEIGHTS) - 1, max(max(values), 0.0)
    heights = (round(last * max(value, 0.0) / most) if most else 0 for value in values)
    return Levels(values[0], values[-1], "".join(HEIGHTS[height] for height in heights))


def number_of_bits(kind: str) -> int | None:
    """The bits of a number format: 8 of `uint8`, 4 of `int4`, 8 of `float8_e4m3`."""
    digits = "".join(char if char.isdigit() else " " for char in kind.partition("_")[0]).split()
    return int(digits[0]) if digits else None


def decibels(value: float | None) -> float | None:
    """An SQNR for the page: finite; None if there is no signal."""
    if value is None or math.isnan(value) or value == -math.inf:
        return None
    return min(value, EXACT_DB)


def quantity(value: float, units: Sequence[str] = ("B", "kB", "MB", "GB")) -> str:
    """A number with a unit of thousands: `quantity(4.2e6)` is `4.2 MB`."""
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {units[power]}".rstrip()


def _rounded(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
