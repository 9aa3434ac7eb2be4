"""The captured, quantized model -> what is quantized, what is float, and why."""

from __future__ import annotations

from torch import nn

from sparsebit.graph.capture import Captured
from sparsebit.quantization.ops.quant_opr import QIdentity, QuantOpr
from sparsebit.quantization.ops.table import OpKind, row_of_module
from sparsebit.quantization.plan import Plan
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.records import Coverage, FloatLayer, OpaqueModule, QuantizedLayer


def describe_coverage(model: nn.Module, captured: Captured, plan: Plan) -> Coverage:
    """Read off the model as it is now (quantizers switched off for good do not count)."""
    layers: dict[str, QuantizedLayer] = {}
    for module in model.modules():
        if not isinstance(module, (QuantOpr, QIdentity)):
            continue
        for quantizer in (child for child in module.children() if isinstance(child, Quantizer)):
            if not quantizer.fake_fused:
                _add_site(layers, module, quantizer)
    weighted = list(_weighted(model))
    floats = {name: reason for name, reason in plan.floats.items() if name not in layers}
    for name, quantizer in _unseen(model):
        floats.setdefault(name, f"{quantizer} never saw a float tensor during calibration")
    opaque = [
        OpaqueModule(path, failure.module_type, failure.reason, failure.line, tuple(n for n in layers if _is_below(n, path)))
        for path, failure in captured.untraced.items()
    ]
    notes = [f"{path or '(model)'} branches on self.training ({line}): its eval branch was captured" for path, line in captured.eval_branches.items()]
    return Coverage(
        tuple(layers.values()),
        tuple(FloatLayer(name, reason) for name, reason in floats.items()),
        tuple(opaque),
        (*notes, *plan.warnings),
        num_weighted=len(weighted),
        num_weighted_quantized=sum(weighted),
    )


def _add_site(layers: dict[str, QuantizedLayer], module: nn.Module, quantizer: Quantizer) -> None:
    name, _, role = _split_site(quantizer.name)
    op = module._get_name() if isinstance(module, QuantOpr) else "QIdentity"
    known = layers.get(name)
    sites = {**(known.sites if known else {}), role: quantizer.spec.dtype_name}
    layers[name] = QuantizedLayer(name, known.op if known and known.op != "QIdentity" else op, sites)


def _split_site(site: str) -> tuple[str, str, str]:
    """`layer1.conv.input.0` -> (`layer1.conv`, `.`, `input.0`)."""
    parts = site.split(".")
    for index in range(len(parts) - 1, 0, -1):
        if parts[index] in ("input", "weight", "output", "shared"):
            return ".".join(parts[:index]), ".", ".".join(parts[index:])
    return site, ".", "input"


def _weighted(model: nn.Module) -> list[bool]:
    """For each layer with a quantizable weight: is it quantized?"""
    found, inside = [], set()
    for module in model.modules():
        if isinstance(module, QuantOpr) and module.weight_quantizer is not None:
            found.append(not module.weight_quantizer.fake_fused)
            inside.update(id(child) for child in module.children())
        elif id(module) not in inside and not isinstance(module, QuantOpr):
            row = row_of_module(module)
            if row is not None and row.kind is OpKind.WEIGHTED and type(module).__module__.startswith("torch.nn."):
                found.append(False)
    return found


def _unseen(model: nn.Module) -> list[tuple[str, str]]:
    return [
        (_split_site(module.name)[0], module.name)
        for module in model.modules()
        if isinstance(module, Quantizer) and module.fake_fused and getattr(module, "was_unseen", False)
    ]


def _is_below(name: str, path: str) -> bool:
    return not path or name.startswith(f"{path}.")
