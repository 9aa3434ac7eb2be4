"""`describe_coverage`: which layers and parameters of a model are quantized, which are float, and why.

It reads the modules as they are now, so that quantizers which calibration has switched off count as float. Reasons come
from the plan, from calibration (`float_reason`), or from the kind of the parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from sparsebit.graph.capture import Captured
from sparsebit.graph.ops.op_rows import OpKind
from sparsebit.graph.ops.op_table import row_of_module, row_of_name
from sparsebit.quantization.building.parameter_sites import OwnedParameter, owned_parameters, quantizers_of_parameters
from sparsebit.quantization.ops.parameter_reads import QuantizedParameter
from sparsebit.quantization.ops.quant_opr import QIdentity, QuantOpr
from sparsebit.quantization.planning.float_reasons import COMPLEX, SWITCHED_OFF, TABLE, VECTOR
from sparsebit.quantization.planning.sites import Plan, split_site
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.records import Coverage, FloatLayer, OpaqueModule, ParameterRecord, QuantizedLayer

_STAYS = ": its activations stay float"
_UNSEEN = " never saw a float tensor during calibration"


def describe_coverage(model: nn.Module, captured: Captured, plan: Plan) -> Coverage:
    """The current coverage of the model; quantizers that are permanently off do not count."""
    layers: dict[str, QuantizedLayer] = {}
    unseen: dict[str, str] = {}
    own_code: Counter[str] = Counter()
    for module in model.modules():
        if not isinstance(module, (QuantOpr, QIdentity, QuantizedParameter)):
            continue
        for quantizer in (child for child in module.children() if isinstance(child, Quantizer)):
            if not quantizer.fake_fused:
                _add_site(layers, module, quantizer)
            elif quantizer.was_unseen:
                why = f": {quantizer.float_reason}" if quantizer.float_reason else _UNSEEN
                unseen.setdefault(split_site(quantizer.name)[0], f"{quantizer.name}{why}")
        if isinstance(module, QuantizedParameter) and not module.weight_quantizer.fake_fused:
            own_code[type(module.owner).__name__] += 1
    reasons, quantizers, weighted = {**unseen, **plan.floats}, quantizers_of_parameters(model), _weighted(model)
    parameters = tuple(_record(one, quantizers.get(id(one.parameter)), reasons) for one in owned_parameters(model))
    reported = layers.keys() | {parameter.name for parameter in parameters}  # parameters are reported by their share
    opaque = (
        OpaqueModule(path, failure.module_type, failure.reason, failure.line, _below(path, layers))
        for path, failure in captured.untraced.items()
        if row_of_name(failure.module_type) is None  # otherwise it is a known op that is written in Python
    )
    return Coverage(
        tuple(layers.values()),
        tuple(FloatLayer(name, reason) for name, reason in reasons.items() if name not in reported),
        tuple(opaque),
        (
            *_notes_of(captured),
            *(reason for name, reason in unseen.items() if name in layers),
            *(f"{kind} reads {n} quantized weights in its own code{_STAYS}" for kind, n in own_code.items()),
            *plan.warnings,
        ),
        num_weighted=len(weighted),
        num_weighted_quantized=sum(weighted),
        parameters=parameters,
    )


def _notes_of(captured: Captured) -> Iterator[str]:
    for path, line in captured.eval_branches.items():
        yield f"{path or '(model)'} branches on self.training ({line}): its eval branch was captured"
    for path in captured.hidden_writes:
        yield (
            f"{path or '(model)'} writes through .data, which autograd does not see: in training, the backward of the "
            "model's own code may use the written values, the copy's uses those that its layers have read"
        )
    if layers := captured.uncalled:
        more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
        yield (
            f"the captured path does not call {', '.join(layers[:3])}{more}: calls that do run the model's own code, "
            "where layers are quantized but functions and operators are not"
        )


def _add_site(layers: dict[str, QuantizedLayer], module: nn.Module, quantizer: Quantizer) -> None:
    if isinstance(module, QuantizedParameter):
        name, role, op = module.layer, f"weight.{module.parameter_name}", type(module.owner).__name__
    else:
        name, role = split_site(quantizer.name)
        op = module._get_name() if isinstance(module, QuantOpr) else "QIdentity"
    known = layers.get(name)
    sites = {**(known.sites if known else {}), role: quantizer.spec.dtype_name}
    layers[name] = QuantizedLayer(name, known.op if known and known.op != "QIdentity" else op, sites)


def _weighted(model: nn.Module) -> list[bool]:
    """For each layer with a quantizable weight: whether it is quantized. A recurrent layer counts once."""
    found: list[bool] = []
    inside: set[int] = set()
    owners: dict[int, bool] = {}
    for module in model.modules():
        if isinstance(module, QuantOpr):
            inside.update(id(child) for child in module.children())
            if module.weight_quantizer is not None:
                found.append(not module.weight_quantizer.fake_fused)
        elif isinstance(module, QuantizedParameter):
            is_quantized = not module.weight_quantizer.fake_fused
            owners[id(module.owner)] = owners.get(id(module.owner), True) and is_quantized
        elif id(module) not in inside:
            row = row_of_module(module)
            if row is not None and row.name == "recurrent":
                owners.setdefault(id(module), False)
            elif row is not None and row.kind is OpKind.WEIGHTED:
                found.append(False)
    return [*found, *owners.values()]


def _record(owned: OwnedParameter, quantizer: Quantizer | None, floats: dict[str, str]) -> ParameterRecord:
    parameter = owned.parameter
    size, before = parameter.numel(), parameter.numel() * parameter.element_size()
    if quantizer is None or quantizer.fake_fused:
        dtype = str(parameter.dtype).removeprefix("torch.")
        return ParameterRecord(owned.full_name, size, dtype, before, before, _why_float(owned, quantizer, floats))
    num_scales = quantizer.scale.numel()
    num_codes = size + (0 if quantizer.spec.symmetric else num_scales)
    packed = -(-num_codes * quantizer.spec.bits // 8) + 4 * num_scales
    return ParameterRecord(owned.full_name, size, quantizer.spec.dtype_name, before, packed)


def _why_float(owned: OwnedParameter, quantizer: Quantizer | None, floats: dict[str, str]) -> str:
    """The reason given for the parameter, its layer, or an enclosing module; otherwise the one for its kind."""
    if owned.full_name in floats:
        return floats[owned.full_name]
    is_matrix = sum(size > 1 for size in owned.parameter.shape) >= 2
    if is_matrix or quantizer is not None:
        path = owned.path
        while path:  # the nearest enclosing module that is float as a whole
            if path in floats and not floats[path].startswith("absorbed by"):
                return floats[path]
            path = path.rpartition(".")[0]
    if quantizer is not None:
        return f"{quantizer.name}{_UNSEEN}" if quantizer.was_unseen else SWITCHED_OFF[0]
    return COMPLEX if owned.parameter.is_complex() else TABLE if is_matrix else VECTOR


def _below(path: str, layers: dict[str, QuantizedLayer]) -> tuple[str, ...]:
    return tuple(name for name in layers if not path or name == path or name.startswith(f"{path}."))
