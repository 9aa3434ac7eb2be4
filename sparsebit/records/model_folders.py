"""Records in the folders of models: `PackedModel` of a quantized language model, `PrunedModel` of a smaller network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from sparsebit.errors import RecordError
from sparsebit.records.json_form import filled, from_plain, to_plain
from sparsebit.records.layer_graph import GraphLayer
from sparsebit.records.scores import ScoreFacts

FILE = "quantization_record.json"
PERPLEXITY_FILE = "perplexity.json"
FORMAT = "sparsebit-packed-model"
VERSION = 1


@dataclass(frozen=True)
class PackedLayer:
    """One linear layer. `kind`: of the numbers, `int` or a float format. `group_size`: 0 is one scale per row.

    `num_bytes`: packed, with its scales; `float_bytes`: of the float weight in its file. `error`: the mean square of
    the rounding error of the layer's output over that of the output, on the calibration text; `nearest_error`: the same
    of rounding to nearest. None if the error was not measured, or rounding was learned afterwards. `after`: the layers
    of the stage before it; layers of one stage read the same input.
    """

    name: str
    kind: str
    bits: int
    group_size: int
    symmetric: bool
    shape: tuple[int, int]
    num_bytes: int
    float_bytes: int | None = None
    error: float | None = None
    nearest_error: float | None = None
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class PackedModel:
    """The result of a quantization. Sizes in bytes of all weights in the files; `bits_per_weight`: with scales.

    `measured_on`: the errors of layers are those of `outputs` on calibration text, or of `weights` if there was none.
    `num_windows`: of calibration text.
    """

    recipe: dict[str, Any]
    layers: tuple[PackedLayer, ...]
    float_bytes: int
    bits_per_weight: float
    measured_on: Literal["outputs", "weights"]
    num_windows: int

    def to_json(self) -> str:
        values = {"format": FORMAT, "version": VERSION, **to_plain(self, PackedModel)}
        return json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str) -> PackedModel:
        """The inverse of `to_json`; a RecordError for anything else. `source`: its name in messages."""
        if values.get("format") != FORMAT or values.get("version") != VERSION:
            found = f"{values.get('format')!r}, version {values.get('version')!r}"
            raise RecordError(f"{source} has the format {found}; this Sparsebit reads {FORMAT!r}, version {VERSION}")
        return filled(cls, values, "record", source)


@dataclass(frozen=True)
class PrunedSize:
    """`macs`: multiply-accumulates of one sample. `num_bytes`: of parameters and buffers."""

    macs: float
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True)
class PrunedLayer:
    """One layer with a weight. `before`, `after`: the shape of its weight; `after` is None for a removed layer."""

    name: str
    op: str
    before: tuple[int, ...]
    after: tuple[int, ...] | None


@dataclass(frozen=True)
class PrunedModel:
    """The measurements of `sparsebit prune`, in `channels.json`. `graph`: of the smaller model; empty if not captured.

    `milliseconds`: of the dense and of the smaller model, one sample in a float file, one thread, in `runtime`; None if
    it was not measured. `latency`: the ratio of both, measured in turns. `output_sqnr_db`: of the smaller model against
    the dense one, on the first batch. `notes`: limits of what is known about its channels.
    """

    model: str
    before: PrunedSize
    after: PrunedSize
    layers: tuple[PrunedLayer, ...]
    graph: tuple[GraphLayer, ...] = ()
    runtime: str = ""
    milliseconds: tuple[float, float] | None = None
    latency: float | None = None
    accuracy: ScoreFacts | None = None
    output_sqnr_db: float | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values of JSON."""
        return dict(to_plain(self, PrunedModel))

    @classmethod
    def from_dict(cls, values: Any, source: str) -> PrunedModel:
        """The inverse of `to_dict`; a RecordError for anything else. `source`: its name in messages."""
        try:
            return from_plain(cls, values, "measured")
        except RecordError as error:
            raise RecordError(f"{source} is damaged or was written by another program: {error}") from None
