"""A summary of a run for a terminal: the numbers at the top, the ladder, the layers that cost most."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sparsebit.report.page_data import EXACT_DB, Layer, Run, quantity

MOST_LAYERS = 12


def text_of(runs: Sequence[Run]) -> RenderableType:
    """The output of `sparsebit report --text`."""
    return Group(*(part for run in runs for part in _parts(run)))


def _parts(run: Run) -> list[RenderableType]:
    state = "" if run.met is None else ", goal met" if run.met else ", goal not met"
    parts: list[RenderableType] = [Text(f"{run.name}: {run.kind}{state}", style="bold")]
    parts += [Text(text) for text in (run.goal and f"goal: {run.goal}", run.reason) if text]
    if run.cards:
        parts.append(_cards(run))
    if run.steps:
        parts.append(_steps(run))
    if run.layers:
        parts.append(_layers(run))
    if run.reproduce:
        parts.append(Text(f"again: {run.reproduce}"))
    return [*parts, Text("")]


def _cards(run: Run) -> Table:
    rows = []
    for card in run.cards:
        share = "" if card.share is None else f"{100 * card.share:.3g} %"
        rows.append((card.label, card.value, card.before, share, card.note))
    return _table(("", "now", "before", "share", ""), rows, ("now", "before", "share"))


def _steps(run: Run) -> Table:
    rows = []
    for step in run.steps:
        loss = "" if step.loss is None else f"{step.loss:.2f}" + ("" if step.bound is None else f" ± {step.bound:.2f}")
        shares = ["" if share is None else f"{share:.3f}" for share in (step.latency, step.bytes, step.macs)]
        shares.append("" if step.bits is None else f"{step.bits:.2f}")
        mark = "*" if step.is_best else ""
        rows.append((mark, step.name, step.fault or step.verdict, loss, *shares, f"{step.seconds:.0f} s"))
    columns = ("", "step", "result", "loss", "time", "bytes", "MACs", "bits", "took")
    return _table(columns, rows, columns[3:])


def _layers(run: Run) -> Table:
    """The layers with the largest errors, else the most pruned, else those in float, else the slowest."""
    worst = sorted((one for one in run.layers if one.sqnr_db is not None), key=_sqnr)
    floats = [one for one in run.layers if one.why_float]
    slow = sorted((one for one in run.layers if one.ms is not None), key=lambda one: -(one.ms or 0.0))
    cut = sorted((one for one in run.layers if one.kept is not None), key=lambda one: one.kept or 0.0)
    found = worst or cut or floats or slow or list(run.layers)
    rows = [_row(layer) for layer in found[:MOST_LAYERS]]
    if len(run.layers) > len(rows):
        rows.append((f"... of {len(run.layers)} layers", *[""] * 7))
    columns = ("layer", "in", "bits", "stays", "SQNR", "time", "bytes", "cause")
    return _table(columns, rows, columns[2:7])


def _row(layer: Layer) -> tuple[str, ...]:
    sqnr = "" if layer.sqnr_db is None else "exact" if layer.sqnr_db >= EXACT_DB else f"{layer.sqnr_db:.1f} dB"
    time = "" if layer.ms is None else f"{layer.ms:.3g} ms"
    size = "" if layer.bytes is None else quantity(layer.bytes)
    bits = "" if layer.bits is None else f"{layer.bits:.3g}"
    stays = "" if layer.kept is None else f"{100 * layer.kept:.3g} %"
    return layer.name, layer.arithmetic, bits, stays, sqnr, time, size, layer.causes[0].text if layer.causes else ""


def _sqnr(layer: Layer) -> float:
    return EXACT_DB if layer.sqnr_db is None else layer.sqnr_db


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str]) -> Table:
    """A table without the columns that are empty in every row."""
    used = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place in used:
        made.add_column(columns[place], overflow="fold", justify="right" if columns[place] in numbers else "left")
    for row in rows:
        made.add_row(*(Text(row[place]) for place in used))
    return made
