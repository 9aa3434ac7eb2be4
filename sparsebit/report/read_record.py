"""A `RunRecord` as a run of the page: the numbers at the top, its layers, and tables of further facts.

A record has only the sections that some verb filled, and the same fact may be in several: sizes in the file, the audit
or the coverage; the error of the outputs measured in torch or by the comparison of the file. Each card takes the first
one that is there; a fact that no section has is left out.
"""

from __future__ import annotations

from sparsebit.records.audit import Audit
from sparsebit.records.run_record import RunRecord
from sparsebit.records.scores import ScoreFacts
from sparsebit.report.layout import draw
from sparsebit.report.page_data import EXACT_DB, Card, Run, Table, decibels, quantity
from sparsebit.report.record_layers import layers_of


def run_of_record(record: RunRecord, name: str) -> Run:
    """The run of a quantized model or of an ONNX file."""
    audit = _main_audit(record.audits)
    layers = layers_of(record, audit)
    kind = "ONNX file" if record.model is None else f"quantized {record.model.module_type}"
    has_edges = any(layer.inputs for layer in layers)
    return Run(
        name=name,
        kind=kind,
        cards=tuple(_cards(record, audit)),
        reason="" if audit is None else audit.verdict,
        layers=layers,
        drawing=draw([layer.name for layer in layers], [layer.inputs for layer in layers]) if has_edges else None,
        tables=tuple(_tables(record)),
        notes=tuple(_notes(record)),
    )


def _main_audit(audits: tuple[Audit, ...]) -> Audit | None:
    """The audit to show: one with timings before one without, then the one with the fewest threads."""
    return min(audits, key=lambda one: (not one.latency, one.num_threads), default=None)


def _cards(record: RunRecord, audit: Audit | None) -> list[Card]:
    cards = [] if record.accuracy is None else [score_card(record.accuracy)]
    if record.output is not None:
        note = f"against float, on {record.output.num_samples} samples"
        cards.append(Card("Output SQNR", _db_words(record.output.sqnr_db), note=note))
    elif record.parity and (noise := record.parity[0].parity.worst.noise_db) is not None and not _changed_by(record):
        cards.append(Card("Output SQNR", _db_words(noise), note="against float"))
    if audit is not None and audit.ratio is not None:
        one, two = audit.latency["float"], audit.latency["quantized"]
        before, now = (one.cpu_ms, two.cpu_ms) if audit.num_threads == 1 else (one.wall_ms, two.wall_ms)
        where = f"{audit.runtime}, {audit.num_threads} thread{'s' if audit.num_threads > 1 else ''}"
        cards.append(Card("Time of a call", f"{now:.3g} ms", f"{before:.3g} ms", audit.ratio, note=where))
    cards += _size_cards(record, audit)
    if audit is not None and audit.heavy:
        integer = sum(layer.arithmetic in ("integer", "weight-only") for layer in audit.heavy)
        note = "layers that multiply matrices"
        cards.append(
            Card("In integers", f"{integer} of {len(audit.heavy)}", share=integer / len(audit.heavy), note=note)
        )
    elif record.coverage is not None and record.coverage.num_weighted:
        coverage = record.coverage
        shown = f"{coverage.num_weighted_quantized} of {coverage.num_weighted}"
        cards.append(Card("Quantized layers", shown, share=coverage.weighted_fraction, note="layers with weights"))
    return cards


def _changed_by(record: RunRecord) -> str:
    """The algorithms that changed weights before errors were measured."""
    return ", ".join(dict.fromkeys(name for profile in record.errors for name in profile.changed_by))


def score_card(found: ScoreFacts) -> Card:
    """The last score (of the file, if it was scored), compared with the first one (of the float model)."""
    first, last = found.models[0], found.models[-1]
    unit = f" {found.unit}" if found.unit else ""
    digits = ".2f" if found.unit else ".5g"
    label = found.metric[:1].upper() + found.metric[1:]
    parts = [] if last is first else [f"of the {last.name}"]
    if last.difference is not None:
        bound = "" if last.margin is None else f" ± {last.margin:.2f}"
        parts.append(f"{last.difference:+.2f}{bound} points")
    if found.num_samples is not None:
        parts.append(f"on {found.num_samples:,} samples")
    before = "" if last is first else f"{first.score:{digits}}{unit}"
    return Card(label, f"{last.score:{digits}}{unit}", before, note=", ".join([*parts, *filter(None, [found.note])]))


def _db_words(value: float) -> str:
    found = _db_cell(value)
    return f"{found:.1f} dB" if isinstance(found, float) else found


def _db_cell(value: float) -> float | str:
    """For a table: an infinite SQNR as a word."""
    found = decibels(value)
    return "no signal" if found is None else "exact" if found >= EXACT_DB else found


def _size_cards(record: RunRecord, audit: Audit | None) -> list[Card]:
    if record.file is not None or audit is not None:
        now = record.file.num_bytes if record.file is not None else audit.num_bytes if audit is not None else 0
        before = record.file.float_bytes if record.file is not None else None
        if before is None and audit is not None:
            before = audit.float_bytes
        label = "Size of the file"
    elif record.coverage is not None and record.coverage.parameters:
        now = sum(parameter.bytes for parameter in record.coverage.parameters)
        before, label = sum(parameter.float_bytes for parameter in record.coverage.parameters), "Size of the weights"
    else:
        return []
    share = now / before if before else None
    return [Card(label, quantity(now), quantity(before) if before else "", share)]


def _tables(record: RunRecord) -> list[Table]:
    tables = []
    if record.parity:
        rows = tuple(
            (check.parity.runtime, check.parity.against, output.name, _db_cell(output.sqnr_db), output.max_difference,
             None if output.top1 is None else 100 * output.top1, output.num_samples, check.fault or "passed")
            for check in record.parity for output in check.parity.outputs
        )  # fmt: skip
        columns = ("runtime", "against", "output", "SQNR dB", "largest difference", "top-1 %", "samples", "verdict")
        tables.append(Table("Comparison of the file with its reference", columns, rows))
    gains = next((profile.gains for profile in record.errors if profile.gains is not None), None)
    if gains is not None:
        gained = tuple((row.layer, row.score, row.gain, _db_cell(row.sqnr_db)) for row in gains.layers)
        tables.append(
            Table("Score with one layer in float", ("layer", "score", "gain", "SQNR dB"), gained, gains.title)
        )
    floats = [p for p in (record.coverage.parameters if record.coverage else ()) if not p.is_quantized]
    if floats:
        kept = tuple((one.name, one.format, one.num_elements, one.float_bytes, one.reason) for one in floats)
        tables.append(Table("Parameters in float", ("parameter", "type", "numbers", "bytes", "reason"), kept))
    if record.runs:
        ran = tuple(
            (run.verb, run.started, run.seconds, ", ".join(f"{key} {value:.1f} s" for key, value in run.phases.items()))
            for run in record.runs
        )
        tables.append(Table("What ran", ("verb", "started", "seconds", "phases"), ran))
    return tables


def _notes(record: RunRecord) -> list[str]:
    notes = [] if record.coverage is None else list(record.coverage.notes)
    if changed := _changed_by(record):
        notes.append(f"errors are counted from the weights that algorithms have changed ({changed}), not from float")
    if record.calibration is not None:
        data = f" ({record.calibration.data})" if record.calibration.data else ""
        notes.append(f"calibrated on {record.calibration.num_samples} samples{data}")
    if record.file is not None:
        notes += [f"file {record.file.path}, sha256 {record.file.sha256}", *(record.file.advice or ())]
    notes += [warning for run in record.runs for warning in run.warnings]
    notes += [warning for audit in record.audits for warning in audit.warnings]
    if record.runs:
        machine = record.runs[-1].environment
        packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
        versions = f"sparsebit {machine.sparsebit}, torch {machine.torch}{', ' if packages else ''}{packages}"
        notes.append(f"{machine.cpu}, {machine.num_cpus} CPUs, {machine.system}; {versions}")
    return list(dict.fromkeys(notes))
