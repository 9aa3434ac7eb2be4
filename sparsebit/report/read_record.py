"""A `RunRecord` as a run of the page: its layers from the graph, the coverage, the error profile and the audit.

The sections name layers differently in part: a record's graph has every op, an audit those nodes of the file that are
layers for the runtime. Layers are joined by name; the nodes of the file that are left are joined with the layers that
are left if there are as many of one kind of op, in order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace

from sparsebit.records.audit import Audit, LayerRun
from sparsebit.records.error_profile import ErrorProfile, SiteError
from sparsebit.records.run_record import RunRecord
from sparsebit.report.causes import causes_of
from sparsebit.report.layout import draw
from sparsebit.report.page_data import (
    EXACT_DB,
    Card,
    Layer,
    Run,
    Table,
    Tensor,
    bins,
    decibels,
    number_of_bits,
    quantity,
)

_ROLE = re.compile(r"(.*)\.((?:input|weight|output|shared|gate)(?:\..*)?)$", re.DOTALL)
_SAME_OPS = {  # an op of the graph: what ONNX calls it
    "linear": ("Gemm", "MatMul"), "mean": ("GlobalAveragePool", "ReduceMean"), "add": ("Add",), "iadd": ("Add",),
    "mul": ("Mul",), "cat": ("Concat",), "matmul": ("MatMul",), "max_pool2d": ("MaxPool",), "max_pool": ("MaxPool",),
    "avg_pool": ("AveragePool", "GlobalAveragePool"), "adaptive_avg_pool2d": ("GlobalAveragePool",),
    "adaptiveavgpool2d": ("GlobalAveragePool",), "conv2d": ("Conv",), "softmax": ("Softmax",), "bmm": ("MatMul",),
    "layer_norm": ("LayerNormalization",), "layernorm": ("LayerNormalization",), "gelu": ("Gelu",),
    "scaled_dot_product_attention": ("Attention",),
}  # fmt: skip


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


def layers_of(record: RunRecord, audit: Audit | None) -> tuple[Layer, ...]:
    """All layers that the record knows, in the order of the graph."""
    found = _Layers()
    for node in record.graph:
        found.add(node.name, node.op, node.inputs)
    if audit is not None:
        found.join(audit)
    if record.coverage is not None:
        for layer in record.coverage.quantized:
            found.add(layer.name, layer.op.removeprefix("Q"))
        for plain_layer in record.coverage.float_layers:
            found.add(plain_layer.name)
            found.change(plain_layer.name, why_float=plain_layer.reason)
        for parameter in record.coverage.parameters:
            found.add_bytes(parameter.name, parameter.float_bytes, parameter.bytes)
    _add_formats(found, record)
    for profile in sorted(record.errors, key=lambda one: one.sync, reverse=True):  # each layer alone counts
        _add_errors(found, profile, record)
    return found.finished()


@dataclass
class _Layers:
    """Layers by name, as they are filled."""

    by_name: dict[str, Layer] = field(default_factory=dict)
    inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, name: str, op: str = "", inputs: tuple[str, ...] = ()) -> None:
        known = self.by_name.get(name)
        if known is None:
            self.by_name[name] = Layer(name, op)
            self.inputs[name] = inputs
        elif not known.op:
            self.change(name, op=op)

    def change(self, name: str, **values: object) -> None:
        self.by_name[name] = replace(self.by_name[name], **values)  # type: ignore[arg-type]  # fields of a layer

    def join(self, audit: Audit) -> None:
        """Add what the runtime does with the nodes of the file."""
        names = _joined(list(self.by_name.values()), audit.layers)
        for node in audit.layers:
            name = names.get(node.name, node.name)
            self.add(name, node.op, tuple(names.get(one, one) for one in node.inputs))
            self.change(
                name,
                arithmetic=node.arithmetic,
                kernel=node.kernel,
                why_float=f"{node.cause} ({node.detail})" if node.detail else node.cause,
                remedy=node.remedy,
                macs=node.macs,
                ms=node.ms,
                float_ms=node.float_ms,
                shape=" × ".join(map(str, node.shape)),
                bytes=node.num_bytes,
                bits=node.weight_bits,
            )

    def add_bytes(self, parameter: str, float_bytes: int, num_bytes: int) -> None:
        name = parameter.rpartition(".")[0]
        if name in self.by_name:
            known = self.tensors_bytes.setdefault(name, [0, 0])
            known[0] += float_bytes
            known[1] += num_bytes
            self.change(name, float_bytes=known[0], bytes=known[1])

    tensors_bytes: dict[str, list[int]] = field(default_factory=dict)

    def finished(self) -> tuple[Layer, ...]:
        index = {name: place for place, name in enumerate(self.by_name)}
        layers = []
        for name, layer in self.by_name.items():
            inputs = tuple(index[one] for one in self.inputs.get(name, ()) if one in index and one != name)
            tensors = tuple(self.tensors.get(name, {}).values())
            full = replace(_with_bits(layer, tensors), inputs=inputs, tensors=tensors)
            layers.append(replace(full, causes=causes_of(full)))
        return tuple(layers)


def _with_bits(layer: Layer, tensors: tuple[Tensor, ...]) -> Layer:
    weights = [tensor.bits for tensor in tensors if tensor.role.startswith("weight") and tensor.bits]
    others = [tensor.bits for tensor in tensors if not tensor.role.startswith("weight") and tensor.bits]
    fused = layer.why_float.startswith("absorbed by")
    why = "" if fused or (tensors and layer.arithmetic != "float") else layer.why_float
    arithmetic = layer.arithmetic or ("float" if why else "integer" if tensors or fused else "")
    return replace(
        layer,
        bits=min(weights) if weights else min(others) if others else layer.bits,
        activation_bits=min(others) if others else None,
        arithmetic=arithmetic,
        why_float=why if arithmetic in ("float", "unknown", "weight-only") else "",
        kernel=layer.kernel or (layer.why_float if fused else ""),
    )


def _joined(layers: list[Layer], nodes: tuple[LayerRun, ...]) -> dict[str, str]:
    """The layer of each node of the file."""
    known = {layer.name for layer in layers}
    found = {node.name: node.name for node in nodes if node.name in known}
    ops = sorted({node.op for node in nodes})
    for op in ops:
        left = [node.name for node in nodes if node.op == op and node.name not in found]
        same = [one.name for one in layers if one.name not in found.values() and op in _SAME_OPS.get(one.op, ())]
        if left and len(left) == len(same):
            found |= zip(left, same, strict=True)
    return found


def _add_formats(found: _Layers, record: RunRecord) -> None:
    """The number formats of all quantized tensors, from the coverage, or the plan before calibration."""
    for layer in () if record.coverage is None else record.coverage.quantized:
        for role, kind in layer.sites.items():
            observer = ((record.plan or {}).get("sites") or {}).get(f"{layer.name}.{role}") or {}
            tensor = Tensor(role, kind, number_of_bits(kind), observer=str(observer.get("observer", "")))
            found.tensors[layer.name][role] = tensor


def _add_errors(found: _Layers, profile: ErrorProfile, record: RunRecord) -> None:
    for error in profile.layers:
        match = _ROLE.match(error.layer)
        name = error.layer if error.layer in found.by_name or match is None else match[1]
        found.add(name)
        if found.by_name[name].sqnr_db is None or name == error.layer:
            found.change(name, sqnr_db=decibels(error.sqnr_db))
    for site in profile.sites:
        match = _ROLE.match(site.site)
        name, role = (match[1], match[2]) if match else (site.site, "input")
        found.add(name)
        known = found.tensors[name].get(role)
        found.tensors[name][role] = _tensor(role, site, "" if known is None else known.observer)


def _tensor(role: str, site: SiteError, observer: str) -> Tensor:
    return Tensor(
        role,
        site.format,
        number_of_bits(site.format),
        site.num_scales,
        decibels(site.sqnr_db),
        site.low,
        site.high,
        site.clip_low,
        site.clip_high,
        site.clipped,
        observer,
        site.scales,
        site.peaks,
        bins(site.histogram),
        bins(site.quantized),
    )


def _main_audit(audits: tuple[Audit, ...]) -> Audit | None:
    """The one with timings, with the fewest threads."""
    return min(audits, key=lambda one: (not one.latency, one.num_threads), default=None)


def _cards(record: RunRecord, audit: Audit | None) -> list[Card]:
    cards = []
    if record.output is not None:
        note = f"against float, on {record.output.num_samples} samples"
        cards.append(Card("Output SQNR", _db_words(record.output.sqnr_db), note=note))
    elif record.parity and (noise := record.parity[0].parity.worst.noise_db) is not None:
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
