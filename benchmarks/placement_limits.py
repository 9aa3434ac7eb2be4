"""What keeps a placement from being faster: the shares of its file's time, and bounds on what one could reach.

`python benchmarks/placement.py --limits --json benchmarks/results/placement_limits.jsonl` measures it, and
`python scripts/benchmark_tables.py` writes the table of docs/benchmarks/placement.md. Each file is profiled in turns
with the float one, kernel by kernel. The times of a profile are scaled to the ratio of CPU time that the files have
without one, since the profiler slows short kernels more than long ones.

Bounds, as parts of float's time:

- `free_conversions`: every op in the arithmetic that is faster for it here, and no conversion costs anything. No
  placement of these kernels is faster; an activation that a float convolution absorbs counts as free.
- at the best rate (`scripts/placement_tables.py`): the measured file, with dense convolutions and linears at the best
  rate that integer kernels reach in any file of the table; all else as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sparsebit.deploy.audit.region_times import RegionTime, RegionTimes

# What a kernel's time is spent on, in the order of the table.
PARTS = ("dense int", "dense float", "depthwise int", "depthwise float", "other int", "other float", "conversions")
_CONVERSIONS = ("QuantizeLinear", "DequantizeLinear", "ReorderInput", "ReorderOutput", "Transpose")
_LEAST_MACS = 0.02  # of the model: rates of smaller layers are mostly the cost of a call
_DENSE, _DEPTHWISE = "dense", "depthwise"


def limits(
    folder: Path, qmodel: Any, batches: list[Any], ratios: Mapping[str, float], float_ms: float
) -> dict[str, Any]:
    """The record of one model; `folder` has its files `float.onnx`, `default.onnx` and `measured.onnx`.

    `ratios`: their CPU times over that of the float file, which takes `float_ms`.
    """
    from sparsebit.quantization.placement_search.tracing import traced

    files = {kind: folder / f"{kind}.onnx" for kind in ("float", "default", "measured")}
    ready = traced(qmodel, batches, "limits", "--limits")
    times = ready.watch.regions({kind: file.read_bytes() for kind, file in files.items()})
    macs = layer_macs(files["float"])
    scales = {kind: ratios[kind] * float_ms / found.total_ms for kind, found in times.items()}
    units = [unit.nodes for unit in ready.graph.units]
    parts = {kind: _parts(found.regions, macs, scales[kind] / float_ms) for kind, found in times.items()}
    dense = sum(count for kind, count in macs.values() if kind == _DENSE)
    return {
        "float_ms": round(float_ms, 4),
        "dense_gmacs": round(dense / 1e9, 4),
        "shares": {kind: {name: round(share, 4) for name, share in found.items()} for kind, found in parts.items()},
        "free_conversions": round(_free_conversions(units, times, macs, scales) / float_ms, 3),
        "rates": {kind: _rate(times[kind], macs, scales[kind]) for kind in times},
    }


def layer_macs(file: Path) -> dict[str, tuple[str, int]]:
    """By the name of a convolution or linear: whether it is dense or depthwise, and its multiply-accumulates."""
    import onnx

    model = onnx.shape_inference.infer_shapes(onnx.load(str(file)))
    values = [*model.graph.value_info, *model.graph.output, *model.graph.input]
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values}
    weights = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    found: dict[str, tuple[str, int]] = {}
    for node in model.graph.node:
        if node.op_type not in ("Conv", "Gemm", "MatMul") or node.output[0] not in shapes:
            continue
        weight, outputs = weights.get(node.input[1]), math.prod(shapes[node.output[0]])
        if node.op_type == "Conv" and weight is not None:
            kind = _DEPTHWISE if weight[1] == 1 and weight[0] > 1 else _DENSE
            found[node.name] = kind, outputs * math.prod(weight[1:])
        elif node.input[0] in shapes:
            found[node.name] = _DENSE, outputs * shapes[node.input[0]][-1]
    return found


def _parts(regions: Iterable[RegionTime], macs: Mapping[str, tuple[str, int]], scale: float) -> dict[str, float]:
    """The time of every part, as a share of float's time."""
    found = dict.fromkeys(PARTS, 0.0)
    for region in regions:
        found[_part(region, macs)] += scale * region.ms
    return found


def _part(region: RegionTime, macs: Mapping[str, tuple[str, int]]) -> str:
    if region.kernel in _CONVERSIONS and not region.layers:
        return "conversions"
    kinds = {macs[layer][0] for layer in region.layers if layer in macs}
    kind = min(kinds, default="other")
    return f"{kind} {'int' if region.arithmetic == 'integer' else 'float'}"


def _free_conversions(
    units: Iterable[Iterable[str]],
    times: Mapping[str, RegionTimes],
    macs: Mapping[str, tuple[str, int]],
    scales: Mapping[str, float],
) -> float:
    """Milliseconds, with every unit as fast as in the file where it is fastest."""
    found = {kind: _by_layer(regions.regions, macs) for kind, regions in times.items()}
    return sum(
        min(scales[kind] * sum(layers.get(node, 0.0) for node in unit) for kind, layers in found.items())
        for unit in map(tuple, units)
    )


def _by_layer(regions: Iterable[RegionTime], macs: Mapping[str, tuple[str, int]]) -> dict[str, float]:
    """Milliseconds of every layer; an activation that a convolution absorbs costs nothing, the convolution all."""
    found: dict[str, float] = {}
    for region in regions:
        layers = [layer for layer in region.layers if layer in macs] or region.layers
        for layer in layers:
            found[layer] = found.get(layer, 0.0) + region.ms / len(layers)
    return found


def _rate(times: RegionTimes, macs: Mapping[str, tuple[str, int]], scale: float) -> dict[str, float | None]:
    """GMAC/s of the dense layers that count: of all integer ones together, of the fastest one, of the float ones."""
    whole = sum(count for kind, count in macs.values() if kind == _DENSE)
    work, spent, best = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}, 0.0
    for region in times.regions:
        count = sum(macs[layer][1] for layer in region.layers if layer in macs and macs[layer][0] == _DENSE)
        if count < _LEAST_MACS * whole or not region.ms:
            continue
        is_integer = region.arithmetic == "integer"
        work[is_integer] += count
        spent[is_integer] += scale * region.ms
        if is_integer:
            best = max(best, count / (scale * region.ms) / 1e6)
    mean = {key: round(work[key] / spent[key] / 1e6, 1) if spent[key] else None for key in work}
    return {"int": mean[True], "best int": round(best, 1) or None, "float": mean[False]}
