"""The folder of a quantized language model as a run of the page.

A folder that `sparsebit.llm.quantize` wrote has a record of its layers. For other folders, the page shows the headers
of the files and the config.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsebit.errors import CheckpointError, RecordError
from sparsebit.records.model_folders import FILE, PERPLEXITY_FILE, PackedLayer, PackedModel
from sparsebit.report.causes import causes_of
from sparsebit.report.json_files import read_json
from sparsebit.report.layout import draw
from sparsebit.report.page_data import Card, Layer, Run, Table, Tensor, decibels, quantity
from sparsebit.tensor_files import StoredTensor, stored_tensors

CONFIG, ALLOCATION = "config.json", "bit_allocation.json"
_PARTS = re.compile(
    r"(.+)\.(weight_packed|weight_scale|weight_shape|weight_zero_point|weight_g_idx|weight_global_scale"
    r"|qweight|qzeros|scales|g_idx)$",
    re.DOTALL,
)


def is_packed(folder: Path) -> bool:
    """Whether the folder is a model whose config says how its weights are quantized."""
    if not (folder / CONFIG).is_file():
        return False
    return isinstance(read_json(folder / CONFIG).get("quantization_config"), dict)


def run_of_language_model(folder: Path) -> Run:
    """The run of a folder of packed weights."""
    config, tensors = read_json(folder / CONFIG), _tensors(folder)
    record = PackedModel.from_dict(read_json(folder / FILE), str(folder / FILE)) if (folder / FILE).exists() else None
    known = {} if record is None else {layer.name: layer for layer in record.layers}
    layers = _layers(_packed(tensors), known, record)
    drawing = draw([layer.name for layer in layers], [layer.inputs for layer in layers]) if layers else None
    kinds = config.get("architectures")
    kind = str(kinds[0]) if isinstance(kinds, list) and kinds else "language model"
    num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    return Run(
        name=folder.resolve().name,
        kind=f"quantized {kind}",
        cards=(*_perplexity_card(folder), *_cards(layers, record, num_bytes)),
        layers=layers,
        drawing=drawing,
        tables=(*_rounding_table(known), *_bits_table(folder), *_float_table(tensors, layers)),
        notes=tuple(_notes(record, config, layers)),
    )


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the files."""
    found: dict[str, StoredTensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            found |= stored_tensors(file)
        except CheckpointError as error:
            raise RecordError(str(error)) from None
    if not found:
        raise RecordError(f"{folder} has no safetensors files; give the folder that `sparsebit llm quantize` wrote")
    return found


def _packed(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """The tensors of each packed layer, by the layer's name and the tensor's own name."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        if match := _PARTS.match(name):
            found.setdefault(match[1], {})[match[2]] = tensor
    for name, parts in found.items():  # fp8: codes under the name of the weight itself
        if (whole := tensors.get(f"{name}.weight")) is not None:
            parts["weight"] = whole
    return found


def _layers(
    packed: Mapping[str, Mapping[str, StoredTensor]], known: Mapping[str, PackedLayer], record: PackedModel | None
) -> tuple[Layer, ...]:
    """The layers in the order of the record; without one, sorted by name, numbers by value."""
    names = sorted(packed, key=_in_order)
    if set(known) == set(packed):
        names = list(known)
    index = {name: place for place, name in enumerate(names)}
    found = []
    for name in names:
        num_bytes, one = sum(part.num_bytes for part in packed[name].values()), known.get(name)
        if one is None:
            layer = Layer(name, "linear", "weight-only", bytes=num_bytes)
        else:
            layer = _known_layer(
                one, num_bytes, index, is_output=record is not None and record.measured_on == "outputs"
            )
        found.append(layer)
    return tuple(found)


def _known_layer(one: PackedLayer, num_bytes: int, index: Mapping[str, int], *, is_output: bool) -> Layer:
    rows, columns = one.shape
    num_scales = rows * (math.ceil(columns / one.group_size) if one.group_size else 1)
    sqnr = _sqnr(one.error)
    kind = f"int{one.bits}" if one.kind == "int" else one.kind
    how = "" if one.kind != "int" else ", no zero points" if one.symmetric else ", zero points"
    size = f"groups of {one.group_size}" if one.group_size else "one scale per row"
    tensor = Tensor("weight", f"{kind}, {size}{how}", one.bits, num_scales, None if is_output else sqnr)
    layer = Layer(
        one.name,
        "linear",
        "weight-only",
        bits=one.bits,
        sqnr_db=sqnr if is_output else None,
        bytes=num_bytes,
        float_bytes=one.float_bytes,
        macs=rows * columns,
        shape=f"{rows} x {columns}",
        inputs=tuple(index[name] for name in one.after if name in index),
        tensors=(tensor,),
    )
    return layer.replace(causes=causes_of(layer))


def _sqnr(error: float | None) -> float | None:
    """In dB, from the noise over the signal."""
    return None if error is None else decibels(-10 * math.log10(error) if error > 0 else math.inf)


def _in_order(name: str) -> tuple[tuple[int, str], ...]:
    """Numbers by value: layers.2 is before layers.10."""
    return tuple((int(part), "") if part.isdigit() and part.isascii() else (-1, part) for part in name.split("."))


def _cards(layers: tuple[Layer, ...], record: PackedModel | None, num_bytes: int) -> list[Card]:
    before = None if record is None else record.float_bytes
    share = num_bytes / before if before else None
    cards = [Card("Size of the files", quantity(num_bytes), quantity(before) if before else "", share)]
    if record is not None:
        cards.append(
            Card("Bits of a weight", f"{record.bits_per_weight:.2f}", note="of the packed layers, with scales")
        )
    cards.append(Card("Packed layers", str(len(layers)), note="linear layers of the blocks"))
    return cards


def _perplexity_card(folder: Path) -> list[Card]:
    """The perplexity that `sparsebit llm quantize --heldout` measured."""
    file = folder / PERPLEXITY_FILE
    if not file.exists():
        return []
    found = read_json(file)
    try:
        before, now = float(found["float"]), float(found["packed"])
        size = f"{int(found['windows'])} windows of {int(found['length'])} tokens"
        note = f"{now / before - 1:+.2%} on held-out text, {size}"
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise RecordError(f"{file} is damaged ({error!r}); remove it, or quantize the model again") from None
    return [Card("Perplexity", f"{now:.2f}", f"{before:.2f}", note=note)]


def _rounding_table(known: Mapping[str, PackedLayer]) -> list[Table]:
    """The error of each layer against that of rounding to nearest, if it was measured."""
    rows = []
    for one in known.values():
        ours, nearest = _sqnr(one.error), _sqnr(one.nearest_error)
        if ours is not None and nearest is not None:
            rows.append((one.name, one.bits, ours, nearest, ours - nearest))
    columns = ("layer", "bits", "SQNR dB", "rounded to nearest dB", "gained dB")
    note = "SQNR of the layer's output on the calibration text; to nearest, with scales that cover the whole range."
    return [Table("What rounding gained", columns, tuple(rows), note)] if rows else []


def _bits_table(folder: Path) -> list[Table]:
    """Mixed bits: what each number of bits was estimated to cost."""
    file = folder / ALLOCATION
    if not file.exists():
        return []
    found = read_json(file)
    try:
        layers = found["layers"]
        bits = sorted({int(one) for layer in layers.values() for one in layer["costs"]})
        rows = tuple(
            (str(name), int(layer["bits"]), *(_cost(layer["costs"].get(str(one))) for one in bits))
            for name, layer in layers.items()
        )
        limit = float(found["limit"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"{file} is damaged ({error!r}); quantize the model again") from None
    note = f"The estimated rise of a token's loss, in nats. At most {limit:g} bits in the mean were allowed."
    return [Table("Bits of each layer", ("layer", "bits", *(f"cost of {one} bits" for one in bits)), rows, note)]


def _cost(value: Any) -> float | None:
    return None if value is None else float(value)


def _float_table(tensors: Mapping[str, StoredTensor], layers: tuple[Layer, ...]) -> list[Table]:
    """The tensors that are not packed, the largest first."""
    packed = {layer.name for layer in layers}
    others = [(name, one) for name, one in tensors.items() if not packed & {name.rpartition(".")[0]}]
    rows = tuple(
        (name, one.dtype.lower(), " x ".join(map(str, one.shape)), one.num_bytes)
        for name, one in sorted(others, key=lambda item: -item[1].num_bytes)
    )
    return [Table("Tensors in float", ("tensor", "type", "shape", "bytes"), rows)] if rows else []


def _notes(record: PackedModel | None, config: Mapping[str, Any], layers: tuple[Layer, ...]) -> list[str]:
    stored = config["quantization_config"]
    notes = [f"stored as {stored.get('quant_method', 'unknown')} {stored.get('format', '')}".rstrip()]
    if record is None:
        return [*notes, f"without {FILE}: the errors of layers and the size before are not known"]
    recipe = ", ".join(f"{name} {_words(value)}" for name, value in record.recipe.items() if value != [])
    notes.append(f"recipe: {recipe}")
    if record.num_windows:
        notes.append(f"calibrated on {record.num_windows} windows of text")
    if any(layer.inputs for layer in layers):
        notes.append("edges of the graph: the order in which layers run; layers in one row read the same input")
    if record.measured_on == "weights":
        notes.append("SQNR is that of the weights: no text was given, so errors of outputs are not known")
    return notes


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
