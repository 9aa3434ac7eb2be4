"""Changes single sites of a built model: another quantizer, other scales, inserted per-channel factors.

`replace_quantizer` makes all checks before it changes anything, then keeps several records of one fact consistent: the
modules, `qmodel.plan`, the blueprint's plan (a saved model is built from it), and the integer arithmetic that refers to
the old quantizer. If the weight was rounded for another format, its float values are restored.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.config.selectors import near_names
from sparsebit.config.targets import is_for, mismatch
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.errors import CalibrationError, ConfigError, SpecError
from sparsebit.graph.state.modes import evaluating
from sparsebit.numerics.qparams import check_backend
from sparsebit.numerics.spec import PerTensor, num_rows
from sparsebit.quantization.building.attach_integer_ops import attach_integer_ops, make_room_for_biases
from sparsebit.quantization.building.attach_quantizers import quantizer_of
from sparsebit.quantization.building.inserted_factors import InsertedFactor, insert, remove
from sparsebit.quantization.calibrating.model_state import originals_of, require_settled
from sparsebit.quantization.calibrating.runner import calibrate_weight
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.quantization.ops.layer_call import current_weight
from sparsebit.quantization.ops.parameter_reads import QuantizedParameter
from sparsebit.quantization.ops.quant_opr import QShared, WeightedQuantOpr
from sparsebit.quantization.planning.group_rules import check_group_format
from sparsebit.quantization.planning.sites import Site
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.registry import QUANTIZERS

log = logging.getLogger(__name__)

WeightOwner = WeightedQuantOpr | QuantizedParameter


def replace_quantizer(qmodel: SimulatedModel, site: str, quantizer: Quantizer | Site | Mapping[str, Any]) -> Quantizer:
    """Put another quantizer at a site of the plan, and update `plan`; returns the new quantizer.

    `quantizer`: a new one, of a registered class and with the site's target; or, to have it built, a `Site` or the
    fields of the site to change (`{"bits": 4}`, as for `plan.replace`). It gets the name, the device and the
    switches of the one that it replaces. If that was calibrated and the new one is not, a weight's scales are
    computed from the weight, and those of an activation from its calibrated range. An existing optimizer does not
    contain the new parameters. Bits that the backend cannot run are an error. If an algorithm rounded the layer's
    weight for another format, weight and bias are reset to those of the float model, and that is logged.
    """
    require_settled(qmodel, "replace_quantizer")
    before = qmodel.sites.get(site)
    has_range = isinstance(quantizer, Quantizer) and quantizer.is_calibrated
    is_unchanged = qmodel.has_built_weights
    # In eval mode no fused training steps are in the model: they are chosen for the existing quantizers.
    with evaluating(qmodel):
        new = _replace(qmodel, site, quantizer)
    if before is not None and before.target == "weight" and before.spec != new.spec:
        _restore_float_weight(qmodel, new, needs_range=before.is_calibrated and not has_range)
    new.train(qmodel.training)
    qmodel.blueprint.plan = qmodel.plan  # a saved model is built from it
    attach_integer_ops(qmodel.built.captured, PROFILES[qmodel.config.BACKEND])
    make_room_for_biases(qmodel.model)
    if is_unchanged:
        qmodel.note_weights()
    return new


def store_qparams(qmodel: SimulatedModel, site: str, scale: Tensor | float, zero_point: Tensor | float = 0) -> None:
    """Set scale and zero point of a site's quantizer, which then counts as calibrated.

    One number for all channels or groups, or one for each. The tensors stay the same objects, as an optimizer may
    hold them. Numbers that the number format or the backend does not support are an error. A weight's scale is raised
    if the layer's bias would otherwise not fit into int32.
    """
    require_settled(qmodel, "store_qparams")
    _quantizer_at(qmodel, site).store_qparams(scale, zero_point)
    make_room_for_biases(qmodel.model)


def insert_factors(qmodel: SimulatedModel, factors: Sequence[InsertedFactor]) -> None:
    """Insert multiplications by a factor per channel (one, at first) into the graph; a saved model keeps them."""
    require_settled(qmodel, "insert_factors")
    assert qmodel.built.root is not None
    insert(qmodel.built.root.graph_module, factors)
    qmodel.built.inserted_factors += tuple(factors)


def remove_factors(qmodel: SimulatedModel, names: Collection[str]) -> None:
    """Remove inserted multiplications from the graph; their factors are lost."""
    built, gone = qmodel.built, [factor for factor in qmodel.built.inserted_factors if factor.name in names]
    if gone and built.root is not None:
        remove(built.root.graph_module, gone)
    built.inserted_factors = tuple(factor for factor in built.inserted_factors if factor not in gone)


def _quantizer_at(qmodel: SimulatedModel, site: str) -> Quantizer:
    """The quantizer of one site; an unknown name is an error that lists the nearest ones."""
    found = qmodel.sites
    if site not in found:
        raise ConfigError(f"the model has no site {site!r}; near names: {', '.join(near_names(site, list(found)))}")
    return found[site]


@torch.no_grad()
def _restore_float_weight(qmodel: SimulatedModel, quantizer: Quantizer, *, needs_range: bool) -> None:
    """Reset the float parameters of the layer of a weight's new quantizer, if algorithms have changed them."""
    originals = originals_of(qmodel, [quantizer.name])
    if not originals:
        return
    for parameter in qmodel.model.parameters():
        if id(parameter) in originals:
            parameter.copy_(originals[id(parameter)])
    names = ", ".join(qmodel.applied_algorithms)
    was = "its weight was rounded for another format, and is the float model's again"
    log.warning("%s: %s; run %s after replace_quantizer()", quantizer.name, was, names)
    if needs_range:
        owners = (m for m in qmodel.model.modules() if isinstance(m, WeightedQuantOpr))
        calibrate_weight(next(m for m in owners if m.weight_quantizer is quantizer))


def _replace(qmodel: SimulatedModel, site: str, wanted: Quantizer | Site | Mapping[str, Any]) -> Quantizer:
    """Check, then put another quantizer at a site and in the plan. The caller attaches the integer ops again."""
    old, model, plan = _quantizer_at(qmodel, site), qmodel.model, qmodel.plan
    owner = next((m for m in model.modules() if isinstance(m, WeightOwner) and m.weight_quantizer is old), None)
    if not isinstance(wanted, (Quantizer, Site, Mapping)):
        raise ConfigError(f"{site}: allowed: a Quantizer, a Site, or fields of the site to change; not {wanted!r}")
    if isinstance(wanted, Quantizer):
        _check_given(model, wanted, old)
        plan = plan.replace({site: _site_of(wanted, plan[site])})
    else:
        plan = plan.replace({site: wanted.completed(plan[site]) if isinstance(wanted, Site) else wanted})
    spec, num_scales, shape = plan[site].spec, 1, torch.Size()
    if owner is not None:
        shape = owner.parameter.shape if isinstance(owner, QuantizedParameter) else current_weight(owner.op).shape
        check_group_format(site, spec, shape, old.backend)
        num_scales = num_rows(shape, spec.granularity)
    new = wanted
    if not isinstance(new, Quantizer):
        new = quantizer_of(plan[site], old.backend, num_scales, old.observed_as)
    if owner is not None and new.scale.numel() != num_scales:
        needs = f"a weight of shape {tuple(shape)} with {spec.granularity} needs num_scales={num_scales}"
        raise SpecError(f"{site}: the quantizer has {new.scale.numel()} scales, and {needs}")
    check_backend(spec, new.zero_point.detach(), old.backend, site)
    needs_range = old.is_calibrated and not new.is_calibrated
    given_range = _range_for(new, old) if needs_range and owner is None else None
    # Everything before this line may raise, and has changed nothing.
    _swap(model, old, new)
    if given_range is not None:
        new.calc_qparams_with_minmax(*given_range)
    elif needs_range and owner is not None:
        calibrate_weight(owner)
    qmodel.plan = plan
    return new


def _check_given(model: nn.Module, new: Quantizer, old: Quantizer) -> None:
    """Raise if a quantizer cannot replace `old`."""
    fault, kind = "", type(new)
    if any(module is new for module in model.modules()):
        fault = f"the quantizer is that of {new.name!r} already; each site needs its own"
    elif (new.target, new.observed_as) != (old.target, old.observed_as):
        fault = (
            f"the quantizer was built for target={new.target!r}, observed_as={new.observed_as!r}; this site needs "
            f"target={old.target!r}, observed_as={old.observed_as!r}"
        )
    elif not is_for(kind, new.target):
        fault = f"{kind.__name__} {mismatch(kind, new.target)}"
    elif new.TYPE not in QUANTIZERS or QUANTIZERS.get(new.TYPE) is not kind:
        fault = (
            f"{kind.__name__} is not registered, so a saved model could not be loaded; use @register_quantizer(name)"
        )
    if fault:
        raise ConfigError(f"{old.name}: {fault}")


def _site_of(quantizer: Quantizer, planned: Site) -> Site:
    """The planned site, updated with the properties of a given quantizer."""
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
    kinds = f"per {old.spec.granularity.kind}, not per {new.spec.granularity.kind}"
    raise CalibrationError(
        f"{old.name}: its range is known {kinds}; replace it before calibration, or by a calibrated one"
    )


def _swap(model: nn.Module, old: Quantizer, new: Quantizer) -> None:
    """Replace a quantizer by one that gets its name, backend, device, mode and switches."""
    new.name, new.backend, new.feeds_softmax = old.name, old.backend, old.feeds_softmax
    new.to(old.calibrated.device).train(old.training)
    if old.fake_fused:  # calibration never reached the site
        new.set_fake_fused()
        new.was_unseen, new.float_reason = old.was_unseen, old.float_reason
    new.follow_range(old.follows)
    new.use_quant = old.use_quant
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is old:
                module._modules[name] = new
            elif isinstance(child, QShared) and child.input_quantizer is old:
                module._modules[name] = QShared(child.name, new).train(child.training)
        if isinstance(module, Quantizer):
            module.replaced_by |= {name: new for name, other in module.replaced_by.items() if other is old}
