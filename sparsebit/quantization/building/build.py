"""`build`: captures a float model, makes its plan, and attaches the quantizers.

In: a `Blueprint` (the float model, config, and optionally a plan, transforms, a saved structure) and an example call.
Out: a `Built` (graphs, structure, example) and the `Plan`. `SimulatedModel` calls it when the model is made, and again
when a call of another form arrives. The blueprint remembers which modules had to run their own code, so that the next
capture does not try to trace them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.config.schema import QuantConfig
from sparsebit.config.selectors import near_names
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.errors import CheckpointError, ConfigError, users_level
from sparsebit.execution.batches import Call
from sparsebit.graph.capture import Captured
from sparsebit.graph.checking.usable_model import require_values
from sparsebit.graph.region import Region
from sparsebit.graph.structure import Structure, difference, structure_of
from sparsebit.graph.tracing.leaf_policy import LeafPolicy
from sparsebit.graph.values.call_form import CallForm
from sparsebit.graph.values.copying import uncompiled
from sparsebit.graph.values.inference_mode import ordinary_model
from sparsebit.quantization.building.inserted_factors import InsertedFactor
from sparsebit.quantization.building.stages import Transform, attach, capture, make_plan, prepare, transform
from sparsebit.quantization.ops.registration import registered_module_types
from sparsebit.quantization.planning.sites import Plan
from sparsebit.quantization.quant_config import require_device


@dataclass
class Blueprint:
    """Everything that a quantized model is built from, and built again from for a call of another form.

    `original`: the float model, which nothing changes. `policy`: which modules run their own code; building adds those
    whose graphs cannot be prepared. `plan`: a given plan, used instead of the backend's rules. `saved_structure`: the
    structure of a saved model, which the first graph must have.
    """

    original: nn.Module
    config: QuantConfig
    policy: LeafPolicy
    plan: Plan | None = None
    transforms: tuple[Transform, ...] = ()
    saved_structure: Structure | None = None
    # Whether the plan has matched the model once. After that, a call of another form may lack some of its sites.
    has_fitted: bool = False

    @classmethod
    def of(
        cls,
        model: nn.Module,
        config: QuantConfig,
        policy: LeafPolicy | None = None,
        *,
        plan: Plan | None = None,
        transforms: Sequence[Transform] = (),
        saved_structure: Structure | None = None,
    ) -> Blueprint:
        require_device(config)
        require_values(model)
        original, policy = ordinary_model(uncompiled(model)), policy or leaf_policy(config)
        return cls(original, config, policy, plan, tuple(transforms), saved_structure, saved_structure is not None)


@dataclass
class Built:
    """The result of building. `example`: the call that it was captured with, tensors on the meta device."""

    captured: Captured
    structure: Structure
    example: Call | None
    folded_layers: list[str] = field(default_factory=list)
    inserted_factors: tuple[InsertedFactor, ...] = ()

    @property
    def root(self) -> Region | None:
        """The graph of the whole model; None where the model itself could not be traced."""
        return self.captured.regions.get("")

    @property
    def model(self) -> nn.Module:
        """The module that runs: the graph of the whole model, or the model's own code around the graphs inside it."""
        whole = self.captured.model
        return whole.graph_module if isinstance(whole, Region) else whole


def build(blueprint: Blueprint, example: Call | None, form: CallForm | None = None) -> tuple[Built, Plan]:
    """Capture, plan, attach. Tensors of the example on the meta device have no values, and are replaced by zeros."""
    original, given = blueprint.original, blueprint.plan
    device = next((p.device for p in original.parameters()), torch.device(blueprint.config.DEVICE))
    example = pytree.tree_map_only(
        Tensor, lambda x: torch.zeros_like(x, device=device) if x.is_meta else x.to(device), example
    )
    captured, structure = _captured(blueprint, example, form)
    plan, placement = make_plan(captured, blueprint.config)
    plan = plan if given is None else given.fitted(plan)
    plan = attach(captured, plan, placement, example=example, given=given)
    if given is not None:
        _require_planned_sites(given, plan, blueprint)
    blueprint.has_fitted = True
    for region in captured.regions.values():
        region.graph_module.settle()
        region.graph_module.note_leaves()
        region.note_frozen_values()
    _warn_of_unmatched_globs(original, blueprint.config, plan)
    return Built(captured, structure, pytree.tree_map_only(Tensor, lambda x: x.to("meta"), example)), plan


def _captured(blueprint: Blueprint, example: Call | None, form: CallForm | None) -> tuple[Captured, Structure]:
    """The captured model, prepared for planning, and its structure.

    A module whose graph cannot be prepared is added to the policy, and the whole model is captured again without it.
    """
    folds, schedule = folds_batchnorm(blueprint.config), blueprint.config.SCHEDULE
    merges, scales = folds and schedule.MERGE_BRANCHES, folds and schedule.FOLD_SCALES
    while True:
        captured = capture(blueprint.original, blueprint.policy, example=example, form=form)
        source = captured.model.source if isinstance(captured.model, Region) else captured.model
        structure = structure_of(captured, source)
        for region in captured.regions.values():
            region.graph_module.rewrite_until_settled()
        reasons = prepare(captured, folds_batchnorm=folds, merges_branches=merges, folds_scales=scales)
        if not reasons:
            # Compared once: a later capture, for a call of another form, may differ from the saved structure.
            saved, blueprint.saved_structure = blueprint.saved_structure, None
            if saved is not None and (found := difference(saved, structure)):
                raise CheckpointError(
                    f"the forward of the {type(blueprint.original).__name__} given differs from that of the model that "
                    f"was saved; give the class that was saved, and its example_inputs:\n{found}"
                )
            transform(captured, blueprint.transforms)
            return captured, structure
        for path, reason in reasons.items():
            blueprint.policy = blueprint.policy.cut(path, reason)


def leaf_policy(config: QuantConfig, **cuts: Mapping[str, str]) -> LeafPolicy:
    """Which modules are left out of graphs. `cuts`: the `own_code` and `untouched` of the policy."""
    return LeafPolicy(config.SKIP_TRACE_MODULES, registered_module_types(), **cuts)


def folds_batchnorm(config: QuantConfig) -> bool:
    """Whether batch norms are folded when a model is built."""
    if config.without_batchnorm_tuning is not None:
        return False
    if config.is_set("SCHEDULE.FUSE_BN"):
        return config.SCHEDULE.FUSE_BN
    return PROFILES[config.BACKEND].folds_batchnorm


def _require_planned_sites(given: Plan, plan: Plan, blueprint: Blueprint) -> None:
    missing, policy = given.missing_in(plan), blueprint.policy
    found = f"the plan has {len(missing)} sites that this model has not: {', '.join(missing[:5])}"
    if missing and (policy.own_code or policy.untouched):
        warnings.warn(f"{found}: their modules run their own code", stacklevel=users_level())
    elif missing and not blueprint.has_fitted:
        raise ConfigError(f"{found}; make the plan from this model: QuantModel(model, config).plan")


def _warn_of_unmatched_globs(model: nn.Module, config: QuantConfig, plan: Plan) -> None:
    paths = [path for path, _ in model.named_modules()]
    skips = (
        f"SKIP_TRACE_MODULES: the glob {glob!r} matches no module; near names: {', '.join(near_names(glob, paths))}"
        for glob in config.SKIP_TRACE_MODULES
        if not any(LeafPolicy(skip=(glob,)).is_skipped(path) for path in paths)
    )
    for message in (*map(str, config.unmatched_globs(plan.layers)), *skips, *plan.warnings):
        warnings.warn(message, stacklevel=users_level())
