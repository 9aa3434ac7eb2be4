"""The quantizers that a site would have with other bits, calibrated as in a rebuilt model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import BackendError, ConfigError, SparsebitError
from sparsebit.execution.batches import Call
from sparsebit.progress import track
from sparsebit.quantization.building.attach_quantizers import quantizer_of
from sparsebit.quantization.ops.layer_call import current_weight
from sparsebit.quantization.ops.parameter_reads import QuantizedParameter
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.planning.sites import Plan
from sparsebit.quantization.quantizers.base import Quantizer

Candidates = dict[str, dict[int, Quantizer]]


def candidates_of(
    model: nn.Module, plan: Plan, wanted: Mapping[str, Sequence[int]], calls: Iterable[Call]
) -> Candidates:
    """`{site: {bits: calibrated quantizer}}`, switched on. Bits that the backend cannot run at a site are left out.

    The site's own quantizer is used for its own bits. The ranges of activations come from one pass over `calls`, if a
    site has other candidates: an observer that weighs rounding errors finds another range for other bits.
    """
    own = {module.name: module for module in model.modules() if isinstance(module, Quantizer)}
    weights = dict(stored_weights(model))
    found: Candidates = {}
    waiting: dict[str, list[Quantizer]] = {}
    for site, choices in wanted.items():
        found[site] = {}
        for bits in choices:
            quantizer = own[site]
            if bits != quantizer.spec.bits:
                changed = _changed(plan, site, bits)
                if changed is None:
                    continue
                num_scales = quantizer.scale.numel()
                quantizer = quantizer_of(changed[site], quantizer.backend, num_scales, quantizer.observed_as)
                quantizer.to(own[site].scale.device)
                if site in weights:
                    quantizer.update_observer(weights[site])
                    quantizer.calc_qparams()
                else:
                    waiting.setdefault(site, []).append(quantizer)
            found[site][bits] = quantizer
        if not found[site]:
            raise BackendError(_why_none(plan, site, choices))
    if waiting:
        _calibrate(model, {own[site]: group for site, group in waiting.items()}, calls)
    for group in found.values():
        for quantizer in group.values():
            if quantizer not in own.values():
                quantizer.use_quant = True
                quantizer.eval()
    return found


def stored_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The weights of the sites whose weight exists without a forward."""
    found: dict[str, Tensor] = {}
    for module in model.modules():
        if isinstance(module, WeightedQuantOpr):
            found[module.weight_quantizer.name] = current_weight(module.op).detach()
        elif isinstance(module, QuantizedParameter):
            found[module.weight_quantizer.name] = module.parameter.detach()
    return list(found.items())


def quantized(quantizer: Quantizer, x: Tensor) -> Tensor:
    """`x` rounded, whether or not the quantizer is switched on."""
    switch, quantizer.use_quant = quantizer.use_quant, True
    try:
        return quantizer.forward(x)
    finally:
        quantizer.use_quant = switch


def _changed(plan: Plan, site: str, bits: int) -> Plan | None:
    try:
        return plan.replace({site: {"bits": bits}})
    except BackendError:
        return None


def _why_none(plan: Plan, site: str, choices: Sequence[int]) -> str:
    try:
        plan.replace({site: {"bits": choices[0]}})
    except SparsebitError as refusal:
        return f"{site} can have none of the candidate bits {', '.join(map(str, choices))}: {refusal}"
    raise ConfigError(f"{site} has no candidate bits; give at least one")


@torch.no_grad()
def _calibrate(model: nn.Module, waiting: Mapping[Quantizer, Sequence[Quantizer]], calls: Iterable[Call]) -> None:
    """Ranges of activations; the candidates of one site share the gathered statistics."""
    first = {quantizer: group[0] for quantizer, group in waiting.items()}

    def observe(quantizer: Any, inputs: tuple[Any, ...]) -> None:
        x = inputs[0]
        if isinstance(x, Tensor) and x.is_floating_point():
            first[quantizer].update_observer(x)

    handles = [quantizer.register_forward_pre_hook(observe) for quantizer in waiting]
    try:
        for args, kwargs in track(calls, "ranges of candidates"):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    for group in waiting.values():
        statistic = group[0].observer.statistic
        for quantizer in group:
            quantizer.observer.statistic = statistic
            quantizer.calc_qparams()
