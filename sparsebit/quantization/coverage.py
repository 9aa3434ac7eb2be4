"""The captured, quantized model -> what is quantized, what is float, and why."""

from __future__ import annotations

from torch import nn

from sparsebit.graph.capture import Captured
from sparsebit.quantization.ops.quant_opr import QIdentity, QuantOpr
from sparsebit.quantization.ops.rows import OpKind
from sparsebit.quantization.ops.table import row_of_module, row_of_name
from sparsebit.quantization.placement import Plan, split_site
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.records import Coverage, FloatLayer, OpaqueModule, QuantizedLayer


def describe_coverage(model: nn.Module, captured: Captured, plan: Plan) -> Coverage:
    """Read off the model as it is now (quantizers switched off for good do not count)."""
    layers: dict[str, QuantizedLayer] = {}
    unseen: dict[str, str] = {}
    for module in model.modules():
        if not isinstance(module, (QuantOpr, QIdentity)):
            continue
        for quantizer in (child for child in module.children() if isinstance(child, Quantizer)):
            if not quantizer.fake_fused:
                _add_site(layers, module, quantizer)
            elif quantizer.was_unseen:
                layer, _ = split_site(quantizer.name)
                unseen.setdefault(layer, f"{quantizer.name} never saw a float tensor during calibration")
    floats = {name: reason for name, reason in {**unseen, **plan.floats}.items() if name not in layers}
    weighted = _weighted(model)
    return Coverage(
        tuple(layers.values()),
        tuple(FloatLayer(name, reason) for name, reason in floats.items()),
        tuple(
            OpaqueModule(path, failure.module_type, failure.reason, failure.line, _below(path, layers))
            for path, failure in captured.untraced.items()
            if row_of_name(failure.module_type) is None  # a known op that happens to be written in Python
        ),
        (
            *(
                f"{path or '(model)'} branches on self.training ({line}): its eval branch was captured"
                for path, line in captured.eval_branches.items()
            ),
            *(reason for name, reason in unseen.items() if name in layers),
            *plan.warnings,
        ),
        num_weighted=len(weighted),
        num_weighted_quantized=sum(weighted),
    )


def _add_site(layers: dict[str, QuantizedLayer], module: nn.Module, quantizer: Quantizer) -> None:
    name, role = split_site(quantizer.name)
    op = module._get_name() if isinstance(module, QuantOpr) else "QIdentity"
    known = layers.get(name)
    sites = {**(known.sites if known else {}), role: quantizer.spec.dtype_name}
    layers[name] = QuantizedLayer(name, known.op if known and known.op != "QIdentity" else op, sites)


def _weighted(model: nn.Module) -> list[bool]:
    """For each layer with a quantizable weight: is it quantized?"""
    found: list[bool] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, QuantOpr):
            inside.update(id(child) for child in module.children())
            if module.weight_quantizer is not None:
                found.append(not module.weight_quantizer.fake_fused)
        elif id(module) not in inside:
            row = row_of_module(module)
            if row is not None and row.kind is OpKind.WEIGHTED:
                found.append(False)
    return found


def _below(path: str, layers: dict[str, QuantizedLayer]) -> tuple[str, ...]:
    return tuple(name for name in layers if not path or name.startswith(f"{path}."))
