"""Changes to single sites of a built model: its quantizers by site, another quantizer at a site."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sparsebit.config.selectors import near_names
from sparsebit.config.targets import is_for, mismatch
from sparsebit.errors import CalibrationError, ConfigError, SpecError
from sparsebit.numerics.qparams import check_backend
from sparsebit.numerics.spec import PerTensor, num_rows
from sparsebit.quantization.calibration import calibrate_weight
from sparsebit.quantization.group_rules import check_group_format
from sparsebit.quantization.ops.layer_call import current_weight
from sparsebit.quantization.ops.parameter_reads import QuantizedParameter
from sparsebit.quantization.ops.quant_opr import QShared, WeightedQuantOpr
from sparsebit.quantization.passes.attach_quantizers import quantizer_of
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.sites import Plan, Site
from sparsebit.registry import QUANTIZERS

WeightOwner = WeightedQuantOpr | QuantizedParameter


def quantizers_by_site(model: nn.Module, plan: Plan) -> dict[str, Quantizer]:
    """The quantizers of a built model by the names of its plan's sites, in the plan's order."""
    found = {module.name: module for module in model.modules() if isinstance(module, Quantizer)}
    return {name: found[name] for name in plan if name in found}


def quantizer_at(model: nn.Module, plan: Plan, site: str) -> Quantizer:
    """The quantizer of one site; an unknown name is an error that lists the nearest ones."""
    found = quantizers_by_site(model, plan)
    if site not in found:
        raise ConfigError(f"the model has no site {site!r}; near names: {', '.join(near_names(site, list(found)))}")
    return found[site]


# --- another quantizer


def replaced(
    model: nn.Module, plan: Plan, site: str, wanted: Quantizer | Site | Mapping[str, Any]
) -> tuple[Plan, Quantizer]:
    """Put another quantizer at a site, in place; gives the changed plan and the new quantizer.

    Everything is checked before the model is changed. The caller attaches the integer ops again: they hold quantizers.
    """
    old = quantizer_at(model, plan, site)
    owner = next((m for m in model.modules() if isinstance(m, WeightOwner) and m.weight_quantizer is old), None)
    if isinstance(wanted, Quantizer):
        _check_given(model, wanted, old)
        wanted_site: Site | Mapping[str, Any] = _site_of(wanted, plan[site])
    elif isinstance(wanted, (Site, Mapping)):
        wanted_site = wanted.completed(plan[site]) if isinstance(wanted, Site) else wanted
    else:
        raise ConfigError(f"{site}: allowed: a Quantizer, a Site, or fields of the site to change; not {wanted!r}")
    plan = plan.replace({site: wanted_site})
    spec = plan[site].spec
    shape = None if owner is None else _weight(owner).shape
    num_scales = 1 if shape is None else num_rows(shape, spec.granularity)
    if shape is not None:
        check_group_format(site, spec, shape, old.backend)
    new = (
        wanted if isinstance(wanted, Quantizer) else quantizer_of(plan[site], old.backend, num_scales, old.observed_as)
    )
    if shape is not None and new.scale.numel() != num_scales:
        raise SpecError(
            f"{site}: the quantizer has {new.scale.numel()} scales, and a weight of shape {tuple(shape)} with "
            f"{spec.granularity} needs {num_scales}; build it with num_scales={num_scales}"
        )
    check_backend(spec, new.zero_point.detach(), old.backend, site)
    needs_range = old.is_calibrated and not new.is_calibrated
    given_range = _range_for(new, old) if needs_range and owner is None else None
    _prepare(new, old)
    _swap(model, old, new)
    if needs_range and owner is not None:
        calibrate_weight(owner)
    elif given_range is not None:
        new.calc_qparams_with_minmax(*given_range)
    return plan, new


def _check_given(model: nn.Module, new: Quantizer, old: Quantizer) -> None:
    """Refuse a quantizer that cannot stand at the place of `old`."""
    if any(module is new for module in model.modules()):
        raise ConfigError(f"{old.name}: the quantizer is that of {new.name!r} already; each site needs its own")
    if new.target != old.target or new.observed_as != old.observed_as:
        raise ConfigError(
            f"{old.name}: the quantizer was built for target={new.target!r}, observed_as={new.observed_as!r}; this "
            f"site needs target={old.target!r}, observed_as={old.observed_as!r}"
        )
    if not is_for(type(new), new.target):
        raise ConfigError(f"{old.name}: {type(new).__name__} {mismatch(type(new), new.target)}")
    if new.TYPE not in QUANTIZERS or QUANTIZERS.get(new.TYPE) is not type(new):
        raise ConfigError(
            f"{old.name}: {type(new).__name__} is not registered, so a saved model could not be loaded; register the "
            "class with @register_quantizer(name)"
        )


def _site_of(quantizer: Quantizer, planned: Site) -> Site:
    """The planned site with what a given quantizer brings."""
    return dataclasses.replace(
        planned,
        spec=quantizer.spec,
        quantizer=QUANTIZERS.canonical(quantizer.TYPE),
        observer=quantizer.observer_name.lower(),
        quantizer_options=quantizer.options,
        observer_options=quantizer.observer_options,
        ema_ratio=quantizer.ema_ratio,
    )


def _range_for(new: Quantizer, old: Quantizer) -> tuple[Tensor, Tensor]:
    """The range of an activation that `old` was calibrated for, in the granularity of `new`."""
    low, high = (end.detach() for end in old.dequantized_range())
    if new.spec.granularity == old.spec.granularity:
        return low, high
    if isinstance(new.spec.granularity, PerTensor):
        return low.min(), high.max()
    raise CalibrationError(
        f"{old.name}: its range is known per {old.spec.granularity.kind}, not per {new.spec.granularity.kind}; replace "
        "the quantizer before calibration, or give one that is calibrated"
    )


def _prepare(new: Quantizer, old: Quantizer) -> None:
    """Name, backend, device, mode and switches of the quantizer that is replaced."""
    new.name, new.backend = old.name, old.backend
    new.to(old.calibrated.device).train(old.training)
    if old.fake_fused:  # calibration never reached the site
        new.set_fake_fused()
        new.was_unseen = old.was_unseen
    new.follow_range(old.follows)
    new.use_quant = old.use_quant


def _swap(model: nn.Module, old: Quantizer, new: Quantizer) -> None:
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is old:
                module._modules[name] = new
            elif isinstance(child, QShared) and child.input_quantizer is old:
                module._modules[name] = QShared(child.name, new).train(child.training)
        if isinstance(module, Quantizer):
            others = module.replaced_by
            others.update({name: new for name, other in others.items() if other is old})


def _weight(owner: WeightOwner) -> Tensor:
    return owner.parameter if isinstance(owner, QuantizedParameter) else current_weight(owner.op)
