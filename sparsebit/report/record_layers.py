"""The layers of a record for the page, joined from its graph, coverage, error profile and audit.

Some sections name layers differently: a record's graph has every op, an audit only the nodes of the file that the
runtime runs as layers. Layers are joined by name. The remaining nodes of one kind of op are joined with the remaining
layers of that kind in order, if there are equally many; otherwise they become layers of their own.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace

from sparsebit.records.audit import Audit, LayerRun
from sparsebit.records.error_profile import ErrorProfile, SiteError
from sparsebit.records.run_record import RunRecord
from sparsebit.report.causes import causes_of
from sparsebit.report.page_data import Layer, Tensor, bins, decibels, number_of_bits

_ROLE = re.compile(r"(.*)\.((?:input|weight|output|shared|gate)(?:\..*)?)$", re.DOTALL)
_SAME_OPS = {  # an op of the graph: its names in ONNX
    "linear": ("Gemm", "MatMul"), "mean": ("GlobalAveragePool", "ReduceMean"), "add": ("Add",), "iadd": ("Add",),
    "mul": ("Mul",), "cat": ("Concat",), "matmul": ("MatMul",), "max_pool2d": ("MaxPool",), "max_pool": ("MaxPool",),
    "avg_pool": ("AveragePool", "GlobalAveragePool"), "adaptive_avg_pool2d": ("GlobalAveragePool",),
    "adaptiveavgpool2d": ("GlobalAveragePool",), "conv2d": ("Conv",), "softmax": ("Softmax",), "bmm": ("MatMul",),
    "layer_norm": ("LayerNormalization",), "layernorm": ("LayerNormalization",), "gelu": ("Gelu",),
    "scaled_dot_product_attention": ("Attention",),
}  # fmt: skip


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
    # `sync` profiles first, because later ones overwrite: the error of a layer quantized alone is the one to show.
    for profile in sorted(record.errors, key=lambda one: one.sync, reverse=True):
        _add_errors(found, profile, record)
    return found.finished()


@dataclass
class _Layers:
    """Layers by name, while facts are added. `bytes`: of a layer's parameters so far, in float and packed."""

    by_name: dict[str, Layer] = field(default_factory=dict)
    inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    bytes: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

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
                shape=" x ".join(str(size or "N") for size in node.shape),
                bytes=node.num_bytes,
                bits=node.weight_bits,
            )

    def add_bytes(self, parameter: str, float_bytes: int, num_bytes: int) -> None:
        name = parameter.rpartition(".")[0]
        if name in self.by_name:
            total = self.bytes[name]
            total[0] += float_bytes
            total[1] += num_bytes
            self.change(name, float_bytes=total[0], bytes=total[1])

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
        if (found.by_name[name].sqnr_db is None or name == error.layer) and _is_of_quantization(error.sqnr_db, profile):
            found.change(name, sqnr_db=decibels(error.sqnr_db))
    for site in profile.sites:
        match = _ROLE.match(site.site)
        name, role = (match[1], match[2]) if match else (site.site, "input")
        found.add(name)
        known = found.tensors[name].get(role)
        made = _tensor(role, site, "" if known is None else known.observer)
        is_rounded = site.target == "weight" and bool(profile.changed_by)
        found.tensors[name][role] = replace(made, sqnr_db=None) if is_rounded else made


def _is_of_quantization(sqnr_db: float, profile: ErrorProfile) -> bool:
    """False for the infinite SQNR of weights that an algorithm has already rounded: it hides their real error."""
    return not (profile.changed_by and sqnr_db == math.inf)


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
