"""Saving, loading, pickling and copying a `QuantModel`, with all changes made to it since it was built.

A graph cannot be pickled. Instead a description (config, plan, form of the example call, names of folded layers, ...)
and the tensors are stored; `revived` rebuilds the same model from these and the float model. So every change that a
verb makes to the structure after building (folded norms, inserted factors, other bits) must be in `description_of`,
and be repeated in `revived` before the tensors are loaded. `checkpoint.py` writes and reads the files.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from sparsebit.errors import CheckpointError, ConfigError, SparsebitError
from sparsebit.execution.batches import Call, as_call
from sparsebit.execution.distributed import gather_shards, once
from sparsebit.graph.values.copying import rebind_functions, without_history
from sparsebit.quantization.building.attach_integer_ops import make_room_for_biases
from sparsebit.quantization.building.build import Blueprint, leaf_policy
from sparsebit.quantization.building.inserted_factors import InsertedFactor
from sparsebit.quantization.building.stages import Transform, name_of
from sparsebit.quantization.calibrating.fold_batchnorm import fold_norms
from sparsebit.quantization.calibrating.model_state import originals_of, require_captured_values, require_settled
from sparsebit.quantization.calibrating.site_changes import insert_factors
from sparsebit.quantization.faithful.simulation import SimulatedModel, code_modules
from sparsebit.quantization.planning.sites import Plan
from sparsebit.quantization.quant_config import parse_qconfig
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.saving import checkpoint

Model = TypeVar("Model", bound=SimulatedModel)


def save(qmodel: SimulatedModel, folder: str | os.PathLike[str]) -> Path:
    """Write a self-describing folder (safetensors + JSON), as a whole: a process that reads it meanwhile, or finds
    it after a kill, sees either the older model or this one.

    With several processes rank 0 writes, and the others return when it is done. Call it on all of them, or on rank 0
    only; on all if the parameters are sharded, as they are gathered.
    """
    require_captured_values(qmodel, "save")
    tensors = gather_shards(qmodel.state_dict(keep_vars=True))
    # Ranks wait for each other by this name. It has no path, because machines may mount the folder differently.
    once(f"save({Path(folder).name!r})", lambda: checkpoint.write(folder, description_of(qmodel), tensors))
    return Path(folder)


def load(
    kind: type[Model],
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    example_inputs: Any = None,
    device: str | None = None,
    transforms: Sequence[Transform] = (),
) -> Model:
    """The saved model; see `QuantModel.load`."""
    description, tensors = checkpoint.read(folder)
    saved, given = description["transforms"], [name_of(step) for step in transforms]
    if saved != given:
        raise CheckpointError(f"{folder} was built with transforms={saved}, load() is given {given}; give those")
    if device is not None:
        description["config"]["DEVICE"] = device
    example = checkpoint.decode(description["example"]) if example_inputs is None else as_call(example_inputs, model)
    try:
        return revived(kind, model, description, example, tensors, transforms)
    except (CheckpointError, ConfigError) as error:  # a GPU that is not here, a quantizer that is not registered, ...
        raise CheckpointError(f"{folder}: {error}") from error
    except SparsebitError:
        raise
    except Exception as error:  # errors of torch and the model's own code if the tensors do not fit
        other = f"another model than the {type(model).__name__} given, or needs its example_inputs"
        raise CheckpointError(f"{folder} was saved from {other}:\n{error}") from error


def with_plan(qmodel: Model, plan: Plan) -> Model:
    """A copy of this calibrated model with only the sites of `plan`, which must be among its own; the rest is float.

    Weights and the numbers of the remaining quantizers are those of this model: nothing is calibrated again. If a
    layer's weight becomes float, changes by algorithms are replaced by the float model's values.
    """
    require_settled(qmodel, "with_plan")
    if missing := plan.missing_in(qmodel.plan):
        raise ConfigError(f"the plan has sites that the model does not have: {', '.join(missing[:5])}")
    description = {**description_of(qmodel), "plan": plan.to_dict()}
    old, kept = qmodel.sites, set(plan.sites)
    originals = originals_of(qmodel, set(old) - kept)
    state = qmodel.state_dict(keep_vars=True)
    tensors = {key: originals.get(id(value), value).detach().to(value, copy=True) for key, value in state.items()}
    transforms = qmodel.blueprint.transforms
    new = revived(type(qmodel), qmodel.original, description, qmodel.built.example, tensors, transforms, sites=kept)
    for name, quantizer in new.sites.items():
        quantizer.load_state_dict(old[name].state_dict())
        quantizer.use_quant = old[name].use_quant
    new.float_parameters = copy.copy(qmodel.float_parameters)
    new.float_values_are_lost = qmodel.float_values_are_lost
    if new.built.root is not None:
        new.float_parameters.drop_outdated(new.built.root.graph_module)
    make_room_for_biases(new.model)
    return new


def description_of(qmodel: SimulatedModel) -> dict[str, Any]:
    """The data needed to rebuild this model, besides the float model and the tensors; stored as JSON."""
    return {
        "config": qmodel.config.to_dict(),
        "example": checkpoint.encode(qmodel.built.example),
        "switches": {"weight": qmodel.is_quantized("weight"), "activation": qmodel.is_quantized("activation")},
        "folded_layers": qmodel.built.folded_layers,
        "inserted_factors": [factor.to_dict() for factor in qmodel.built.inserted_factors],
        "own_code": dict(qmodel.blueprint.policy.own_code),
        "untouched": dict(qmodel.blueprint.policy.untouched),
        "transforms": [name_of(step) for step in qmodel.blueprint.transforms],
        "plan": None if qmodel.blueprint.plan is None else qmodel.blueprint.plan.to_dict(),
        "algorithms": list(qmodel.applied_algorithms),
        "weights_changed": qmodel.float_values_are_lost or bool(len(qmodel.float_parameters)),
        "graphs": qmodel.built.structure,
        "sites": {q.name: q.describe() for q in qmodel.quantizers() if not q.fake_fused},
    }


def revived(
    kind: type[Model],
    model: nn.Module,
    description: dict[str, Any],
    example: Call | None,
    tensors: dict[str, Tensor],
    transforms: Sequence[Transform] = (),
    *,
    sites: set[str] | None = None,
) -> Model:
    """The model of a description by `description_of`, rebuilt around the float `model`.

    `sites`: the sites of the new model if it has fewer than the old one; then scales and zero points are not loaded.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user saw these warnings when the model was first built
        config, saved = parse_qconfig(description["config"]), description["plan"]
        plan = Plan.from_dict({**saved, "config": config.to_dict()}) if saved else None
        cuts = {name: description[name] for name in ("own_code", "untouched")}
        policy = leaf_policy(config, **cuts)
        graphs = description["graphs"]
        blueprint = Blueprint.of(model, config, policy, plan=plan, transforms=transforms, saved_structure=graphs)
        qmodel = kind.built_from(blueprint, example)
    fold_norms(qmodel, lambda name, *_: name in description["folded_layers"])
    if inserted := [InsertedFactor.from_dict(record) for record in description["inserted_factors"]]:
        insert_factors(qmodel, inserted)
    for quantizer in (q for q in qmodel.quantizers() if not q.fake_fused):
        site = description["sites"].get(quantizer.name, {})  # a quantizer that was switched off is not described
        quantizer.set_bit(site.get("bits", quantizer.spec.bits))
    if sites is None:
        is_unchanged = all(p.cpu().equal(tensors.get(name, p).cpu()) for name, p in qmodel.named_parameters())
        qmodel.load_state_dict(tensors)
        if is_unchanged:  # a pickled model with the float model's weights can still be captured again
            qmodel.note_weights()
        switches = description["switches"]
        qmodel.set_quant(switches["weight"], switches["activation"])
    else:
        quantizers = tuple(f"{name}." for name, module in qmodel.named_modules() if isinstance(module, Quantizer))
        own = qmodel.state_dict()
        rest = {key: value for key, value in tensors.items() if key in own and not key.startswith(quantizers)}
        qmodel.load_state_dict({**own, **rest})
    qmodel.applied_algorithms = tuple(description["algorithms"])
    qmodel.float_values_are_lost = description["weights_changed"]
    return qmodel.eval()


def reduced(qmodel: SimulatedModel) -> tuple[Any, ...]:
    """For `__reduce__`: a function and its arguments, from which pickle rebuilds the model."""
    require_captured_values(qmodel, "pickle")
    made_of = qmodel.original, description_of(qmodel), qmodel.built.example
    return _unpickled, (type(qmodel), qmodel.training, *made_of, qmodel.state_dict(), qmodel.blueprint.transforms)


def _unpickled(kind: type[SimulatedModel], training: bool, *parts: Any) -> SimulatedModel:
    return revived(kind, *parts).train(training)


def deep_copied(qmodel: Model, memo: dict[int, Any]) -> Model:
    """For `__deepcopy__`. `memo` maps the model to its copy, so that the copied parts refer to the copy."""
    new = type(qmodel).__new__(type(qmodel))
    memo[id(qmodel)] = new
    memo.update(without_history(qmodel) | without_history(qmodel.original))
    own = {key: value for key, value in qmodel.__dict__.items() if key != "built_state"}
    new.__dict__.update(copy.deepcopy(own, memo))
    rebind_functions(code_modules(qmodel), code_modules(new), memo)
    for path, region in new.built.captured.regions.items():
        region.follow_frozen_values(qmodel.built.captured.regions[path])
    if qmodel.has_built_weights:
        new.note_weights()
    new.built_state = qmodel.built_state.of_copy(new.original, new.source)
    return new
