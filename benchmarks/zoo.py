"""Capture + W8A8 calibration + forward of many architectures with random weights.

    python benchmarks/zoo.py [--only GLOB] [--json FILE]

Prints one JSON line per architecture: whether it was captured, the float forward's relative difference to the original
(on the batch of the calibration and on another one), the output SQNR of W8A8, the shares of weighted layers and of
parameters quantized, and the modules that could not be traced.
"""

from __future__ import annotations

import copy
import math
import time
from typing import Any

import torch
from common import sqnr_db
from torch import nn
from torch.utils import _pytree as pytree
from zoo_models import ZOO
from zoo_runner import run_zoo

CONFIG = {
    "BACKEND": "virtual",
    "DEVICE": "cpu",
    "SCHEDULE": {"FUSE_BN": True},
    "W": {"QSCHEME": "per-channel-symmetric", "QUANTIZER": {"BIT": 8}},
    "A": {"QSCHEME": "per-tensor-affine", "QUANTIZER": {"BIT": 8}},
}


def examine(name: str) -> dict[str, Any]:
    import sparsebit

    torch.manual_seed(0)
    model, batch = ZOO[name]()
    model.eval()
    spread(model)
    start = time.perf_counter()
    qmodel = sparsebit.quantize(model, [batch], CONFIG)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        expected, quantized = _outputs(model, batch), _outputs(qmodel, batch)
        qmodel.set_quant(w_quant=False, a_quant=False)
        plain = _outputs(qmodel, batch)
        other = _other(batch)
        elsewhere = _difference(_outputs(model, other), _outputs(qmodel, other))
    coverage = qmodel.coverage
    difference = max(_difference(expected, plain), elsewhere)
    exact = difference <= 1e-5
    # Folding changes the order of roundings: then float64 is the judge of who is nearer.
    reference = expected if exact else _outputs(copy.deepcopy(model).double(), _double(batch))
    distances = {"original": _difference(reference, expected), "captured": _difference(reference, plain)}
    quality = sqnr_db(torch.cat([e.flatten() for e in expected]), torch.cat([q.flatten() for q in quantized]))
    return {
        "model": name,
        "ok": (exact or distances["captured"] <= 3 * distances["original"]) and math.isfinite(quality),
        "float_difference": difference,
        "distance_to_float64": None if exact else distances,
        "sqnr_db": round(quality, 1) if math.isfinite(quality) else None,
        "weighted_quantized": f"{coverage.num_weighted_quantized}/{coverage.num_weighted}",
        "layers_quantized": len(coverage.quantized),
        "parameters_quantized": round(100 * coverage.parameter_fraction, 1),
        "untraced": [
            f"{m.path or '(model)'}: {m.reason[:100]} @ {m.line.rsplit('/', 1)[-1][:90]}" for m in coverage.opaque
        ],
        "unknown_ops": sorted(
            {f.reason.split(":")[0] for f in coverage.float_layers if f.reason.startswith("unknown op")}
        ),
        "seconds": round(seconds, 1),
    }


def spread(model: nn.Module) -> None:
    """Batch-norm statistics and layer scales as if trained: fresh ones hide errors behind ones and zeros."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
    for parameter in model.parameters():
        if not parameter.detach().any():
            torch.nn.init.normal_(parameter, 0, 0.02, generator=generator)


def _difference(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest value."""
    pairs = zip(expected, found, strict=True)
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-12)) for a, b in pairs)


def _other(batch: Any) -> Any:
    """Inputs of the same form with other values; masks of zeros and ones stay."""

    def change(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            return torch.randn_like(x)
        return x.flip(-1) if x.numel() and int(x.max()) > 1 else x

    return pytree.tree_map_only(torch.Tensor, change, batch)


def _double(batch: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, batch)


@torch.no_grad()
def _outputs(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    result = model(**batch) if isinstance(batch, dict) else model(batch)
    leaves = pytree.tree_leaves(dict(result) if hasattr(result, "keys") else result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


if __name__ == "__main__":
    run_zoo("zoo", examine, __doc__)
