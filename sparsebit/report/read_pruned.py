"""The folder of a pruned model as a run of the page: what remains of each layer.

`sparsebit prune` writes what it measured into the folder; one that `sparsebit.sparse.save` wrote has shapes alone.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from sparsebit.errors import CheckpointError, RecordError
from sparsebit.records.model_folders import PrunedLayer, PrunedModel
from sparsebit.report.layout import draw
from sparsebit.report.page_data import Card, Layer, Run, Table, decibels, quantity
from sparsebit.report.read_record import score_card
from sparsebit.tensor_files import StoredTensor, stored_tensors

CHANNELS, TENSORS = "channels.json", "model.safetensors"
_COUNTS = ("", "k", "M", "G", "T")


def run_of_pruned(folder: Path, description: dict[str, Any]) -> Run:
    """The run of a folder that `sparsebit prune` or `sparsebit.sparse.save` wrote."""
    try:
        tensors = stored_tensors(folder / TENSORS)
    except CheckpointError as error:
        raise RecordError(str(error)) from None
    kind, found = str(description.get("class", "model")).rpartition(".")[2], description.get("measured")
    run = Run(name=folder.resolve().name, kind=f"pruned {kind}")
    if found is None:
        return _unmeasured(run, tensors)
    record = PrunedModel.from_dict(found, str(folder / CHANNELS))
    layers = _layers(record, tensors)
    has_edges = any(layer.inputs for layer in layers)
    return run.replace(
        cards=tuple(_cards(record)),
        layers=layers,
        drawing=draw([layer.name for layer in layers], [layer.inputs for layer in layers]) if has_edges else None,
        tables=tuple(_tables(record)),
        notes=record.notes,
    )


def _unmeasured(run: Run, tensors: dict[str, StoredTensor]) -> Run:
    """The run from the files alone: the current sizes, without those of the dense model."""
    num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    layers = tuple(
        Layer(name.removesuffix(".weight"), bytes=tensor.num_bytes, shape=_shape(tensor.shape))
        for name, tensor in tensors.items()
        if name.endswith(".weight")
    )
    note = "saved without measurements: what was removed and what it cost is not known; `sparsebit prune` records it"
    return run.replace(cards=(Card("Size of the weights", quantity(num_bytes)),), layers=layers, notes=(note,))


def _layers(record: PrunedModel, tensors: dict[str, StoredTensor]) -> tuple[Layer, ...]:
    """All layers of the smaller model's graph, then those that are not in it."""
    weighted = {layer.name: layer for layer in record.layers if layer.after is not None}
    graph = {layer.name: layer for layer in record.graph}
    names = [*graph, *(name for name in weighted if name not in graph)]
    index = {name: place for place, name in enumerate(names)}
    found = []
    for name in names:
        node, layer = graph.get(name), weighted.get(name)
        inputs = tuple(index[one] for one in node.inputs if one in index and one != name) if node is not None else ()
        op = node.op if node is not None else layer.op if layer is not None else ""
        made = Layer(name, op, inputs=inputs)
        found.append(made if layer is None else _with_weight(made, layer, tensors))
    return tuple(found)


def _with_weight(made: Layer, layer: PrunedLayer, tensors: dict[str, StoredTensor]) -> Layer:
    assert layer.after is not None
    stored, before, after = tensors.get(f"{layer.name}.weight"), math.prod(layer.before), math.prod(layer.after)
    changed = made.replace(shape=_change(layer), kept=after / before if before else None)
    if stored is None or not after:
        return changed
    return changed.replace(bytes=stored.num_bytes, float_bytes=stored.num_bytes * before // after)


def _cards(record: PrunedModel) -> list[Card]:
    before, after = record.before, record.after
    cards = [] if record.accuracy is None else [score_card(record.accuracy)]
    if record.milliseconds is not None:
        then, now = record.milliseconds
        note = f"{record.runtime}, float file, one sample, one thread"
        cards.append(Card("Time of a call", f"{now:.3g} ms", f"{then:.3g} ms", record.latency, note=note))
    cards += [
        _size_card("Multiplications", before.macs, after.macs, _COUNTS, "of one sample"),
        _size_card("Parameters", before.num_parameters, after.num_parameters, _COUNTS),
        _size_card("Size of the weights", before.num_bytes, after.num_bytes, ("B", "kB", "MB", "GB"), "with buffers"),
    ]
    if (sqnr := decibels(record.output_sqnr_db)) is not None:
        cards.append(Card("Output SQNR", f"{sqnr:.1f} dB", note="against the dense model, on the first batch"))
    return cards


def _size_card(label: str, before: float, after: float, units: tuple[str, ...], note: str = "") -> Card:
    return Card(label, quantity(after, units), quantity(before, units), after / before if before else None, note=note)


def _tables(record: PrunedModel) -> list[Table]:
    removed = tuple((one.name, one.op, _shape(one.before)) for one in record.layers if one.after is None)
    return [Table("Removed layers", ("layer", "operator", "weight"), removed)] if removed else []


def _change(layer: PrunedLayer) -> str:
    assert layer.after is not None
    after = _shape(layer.after)
    return after if layer.after == layer.before else f"{_shape(layer.before)} → {after}"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
