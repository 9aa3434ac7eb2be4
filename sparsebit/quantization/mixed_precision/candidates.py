"""The quantizers that a site would have with other bits, calibrated as in a rebuilt model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import BackendError
from sparsebit.execution.batches import Call
from sparsebit.progress import track
from sparsebit.quantization.building.attach_quantizers import quantizer_of
from sparsebit.quantization.ops.layer_call import current_weight
from sparsebit.quantization.ops.parameter_reads import QuantizedParameter
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.planning.sites import Plan
from sparsebit.quantization.quantizers.base import Quantizer

Candidates = dict[str, dict[int, Quantizer]]


def candidates_of(model: nn.Module, plan: Plan, wanted: Mapping[str, list[int]], calls: Iterable[Call]) -> Candidates:
    """`{site: {bits: calibrated quantizer}}`, switched on. Bits that the backend cannot run at a site are left out.

    The site's own quantizer is used for its own bits. If an activation has other candidates, their ranges come from one
    pass over `calls`: an observer that weighs rounding errors (mse) finds another range for other bits.
    """
    own = {module.name: module for module in model.modules() if isinstance(module, Quantizer)}
    weights = stored_weights(model)
    found: Candidates = {}
    waiting: dict[Quantizer, list[Quantizer]] = {}
    for site, choices in wanted.items():
        present = own[site]
        found[site] = {present.spec.bits: present}
        for bits in choices:
            if bits == present.spec.bits:
                continue
            try:
                changed = plan.replace({site: {"bits": bits}})[site]
            except BackendError:
                continue
            quantizer = quantizer_of(changed, present.backend, present.scale.numel(), present.observed_as)
            found[site][bits] = quantizer.to(present.scale.device)
            if site in weights:  # needs no data; ranges of activations are observed below, for all sites in one pass
                quantizer.update_observer(weights[site])
                quantizer.calc_qparams()
            else:
                waiting.setdefault(present, []).append(quantizer)
    if waiting:
        _calibrate(model, waiting, calls)
    for site, group in found.items():
        for quantizer in group.values():
            if quantizer is not own[site]:
                quantizer.use_quant = True
                quantizer.eval()
    return found


def stored_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the sites whose weight exists without a forward."""
    found: dict[str, Tensor] = {}
    for module in model.modules():
        if isinstance(module, WeightedQuantOpr):
            found[module.weight_quantizer.name] = current_weight(module.op).detach()
        elif isinstance(module, QuantizedParameter):
            found[module.weight_quantizer.name] = module.parameter.detach()
    return found


def quantized(quantizer: Quantizer, x: Tensor) -> Tensor:
    """`x` rounded, whether or not the quantizer is switched on."""
    switch, quantizer.use_quant = quantizer.use_quant, True
    try:
        return quantizer.forward(x)
    finally:
        quantizer.use_quant = switch


@torch.no_grad()
def _calibrate(model: nn.Module, waiting: Mapping[Quantizer, Sequence[Quantizer]], calls: Iterable[Call]) -> None:
    """Calibrate candidates for activations. Those of one site share the statistic, and compute their own ranges."""

    def observe(quantizer: Any, inputs: tuple[Any, ...]) -> None:
        x = inputs[0]
        if isinstance(x, Tensor) and x.is_floating_point():
            waiting[quantizer][0].update_observer(x)

    with contextlib.ExitStack() as stack:
        for quantizer in waiting:
            stack.callback(quantizer.register_forward_pre_hook(observe).remove)
        for args, kwargs in track(calls, "ranges of candidates"):
            model(*args, **kwargs)
    for group in waiting.values():
        statistic = group[0].observer.statistic
        for quantizer in group:
            quantizer.observer.statistic = statistic
            quantizer.calc_qparams()
