"""`SimulatedModel`: a captured copy of a model with quantizers in it, which runs calls of any form."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from sparsebit.config.schema import QuantConfig
from sparsebit.config.selectors import near_names
from sparsebit.config.targets import Target, as_target
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.errors import CaptureError, CheckpointError, ConfigError
from sparsebit.execution.batches import Call
from sparsebit.graph.capture import Captured
from sparsebit.graph.checking.outcome import undisturbed_randomness
from sparsebit.graph.nodes.absorbed import Absorbed
from sparsebit.graph.nodes.example import GuardError
from sparsebit.graph.region import Region
from sparsebit.graph.structure import Structure, difference, structure_of
from sparsebit.graph.tracing.leaf_policy import LeafPolicy
from sparsebit.graph.values.call_form import VARYING, CallForm, call_form
from sparsebit.graph.values.copying import uncompiled
from sparsebit.graph.values.inference_mode import ordinary_model
from sparsebit.quantization.building.coverage import describe_coverage
from sparsebit.quantization.building.float_parameters import FloatParameters
from sparsebit.quantization.building.inserted_factors import InsertedFactor
from sparsebit.quantization.building.stages import Transform, attach, capture, make_plan, prepare, transform
from sparsebit.quantization.faithful.carried_state import BuiltState, CarriedState
from sparsebit.quantization.ops.registration import registered_module_types
from sparsebit.quantization.planning.sites import Plan
from sparsebit.quantization.quant_config import require_device
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.records import Coverage

log = logging.getLogger(__name__)


class SimulatedModel(nn.Module):
    """A captured copy of a model with quantizers as the config and the backend require: its origin and how it runs.
    `QuantModel` is one; so are the copies of single modules that a proof compares. Made by `_set_up`.
    """

    model: nn.Module
    unproved = ""  # why the copy may not compute the same as the model
    _saved_structure: Structure | None = None  # of the saved model that this one is rebuilt from
    _has_fitting_plan = False  # a call of another form, captured later, may lack sites of the plan
    is_calibrating = False  # between prepare_calibration() and calc_qparams()
    # Whether algorithms changed weights before the model was saved, or tuned its norms; `float_parameters` is empty.
    float_values_are_lost = False
    float_parameters: FloatParameters  # weights and biases of the float model, of those that algorithms have changed
    applied_algorithms: tuple[str, ...] = ()  # algorithms that changed the calibrated model, by name in `ALGORITHMS`

    # --- building

    def _set_up(
        self,
        model: nn.Module,
        config: QuantConfig,
        example: Call | None,
        policy: LeafPolicy | None = None,
        form: CallForm | None = None,
        plan: Plan | None = None,
        transforms: Sequence[Transform] = (),
    ) -> None:
        require_device(config)
        _require_values(model)
        self.float_parameters = FloatParameters()
        self.config, self._given_plan, self._transforms = config, plan, tuple(transforms)
        # In a tuple, so that it is not a child module. It is kept to capture again if a call has another form.
        model = ordinary_model(uncompiled(model))
        self._original = (model,)
        self.training = model.training  # when the model is captured again, all modules are put into this mode
        self._policy = policy or leaf_policy(config)
        self._build(example, form)

    def _build(self, example: Call | None, form: CallForm | None = None) -> None:
        """Capture, plan, attach. An example on the meta device has shapes only: its values are zeros."""
        # Parameters that are created in inference mode could never be trained.
        with torch.inference_mode(False), undisturbed_randomness():
            self._build_trainable(example, form)
        self.note_weights()
        self._built_state = BuiltState(self.original, self.source)

    def _build_trainable(self, example: Call | None, form: CallForm | None) -> None:
        model = self.original
        device = next((p.device for p in model.parameters()), torch.device(self.config.DEVICE))
        example = pytree.tree_map_only(
            Tensor, lambda x: torch.zeros_like(x, device=device) if x.is_meta else x.to(device), example
        )
        captured, structure = self._capture(example, form)
        plan, placement = make_plan(captured, self.config)
        plan = plan if self._given_plan is None else self._given_plan.fitted(plan)
        plan = attach(captured, plan, placement, example=example, given=self._given_plan)
        if self._given_plan is not None:
            _require_planned_sites(self._given_plan, plan, self._policy, was_fitting=self._has_fitting_plan)
        self._has_fitting_plan = True
        for region in captured.regions.values():
            region.graph_module.note_leaves()
            region.note_frozen_values()
        self._captured, self._structure, self.plan = captured, structure, plan
        self._example: Call | None = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), example)
        self._folded_layers: list[str] = []  # by batch-norm tuning
        self._inserted_factors: tuple[InsertedFactor, ...] = ()
        self._ran_source = False
        self.model = captured.model.graph_module if isinstance(captured.model, Region) else captured.model
        self.training = self.model.training  # used when the model is captured again
        self.to(self.config.DEVICE)
        _warn_of_unmatched_globs(self.original, self.config, plan)
        coverage = self.coverage
        log.info("captured: %s; %s", str(coverage).splitlines()[0], coverage.weights)

    def _capture(self, example: Call | None, form: CallForm | None) -> tuple[Captured, Structure]:
        """The captured model, ready for a plan, and the structure that saving compares. A module whose graph cannot be
        prepared runs its own code.
        """
        while True:
            captured = capture(self.original, self._policy, example=example, form=form)
            source = captured.model.source if isinstance(captured.model, Region) else captured.model
            structure = structure_of(captured, source)
            folds, schedule = folds_batchnorm(self.config), self.config.SCHEDULE
            reasons = prepare(
                captured,
                folds_batchnorm=folds,
                merges_branches=folds and schedule.MERGE_BRANCHES,
                folds_scales=folds and schedule.FOLD_SCALES,
            )
            if not reasons:
                saved, self._saved_structure = self._saved_structure, None
                _require_same_structure(self.original, saved, structure)
                transform(captured, self._transforms)
                return captured, structure
            for path, reason in reasons.items():
                self._policy = self._policy.cut(path, reason)

    @property
    def _root(self) -> Region | None:
        """The graph of the whole model; None if the model itself could not be traced."""
        return self._captured.regions.get("")

    @property
    def call_form(self) -> CallForm | None:
        """How `forward` is called: constants by value, other parameters as varying; None for an opaque model."""
        if self._root is None:
            return None
        return {**self._root.constants, **dict.fromkeys(self._root.inputs, VARYING)}

    # --- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._root is None:
            output = self.model(*args, **kwargs)
            self._record((args, kwargs))
            return output
        inputs = self._root.bind(args, kwargs)
        if inputs is None:
            self._capture_again(args, kwargs)
            return self(*args, **kwargs)
        try:
            output = self._root.attempt(inputs)
        except GuardError as error:
            if self._inserted_factors:
                raise CaptureError(
                    f"{error}: the model's own code cannot run in the place of the graph, which "
                    f"has multiplications that were inserted by smoothing; {error.advice}"
                ) from error
            self._warn_of_source(error)
            output, inputs = self._root.run_source(args, kwargs), None
        self._record(inputs)
        return output

    def _record(self, call: Any) -> None:
        """Called after every forward with its inputs; None if the forward cannot be repeated from them."""

    def _warn_of_source(self, error: GuardError) -> None:
        if not self._ran_source:
            self._ran_source = True
            log.warning(
                "%s: the call runs the model's own code, where layers are quantized but functions and operators are "
                "not; %s",
                *(error, error.advice),
            )

    def _capture_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture again for a call of another form than the captured one."""
        assert self._root is not None
        form = call_form(self._root.source, args, kwargs)
        log.warning(
            "captured again for a call with %s: parameters are new objects; build the QuantModel with "
            "example_inputs like this call's to avoid it",
            shown(form),
        )
        state = CarriedState.of(self._built_state, self.original, self.source, folded_tensors(self))
        self._rebuild((args, kwargs))
        if self._root is not None and self._root.bind(args, kwargs) is None:
            raise CaptureError(f"a call with {shown(form)} cannot be captured; see coverage")
        state.put_into(self.source)

    def _rebuild(self, example: Call | None) -> None:
        """Capture again; parameters that do not change stay the same objects."""
        if not self.has_built_weights:
            raise CaptureError(
                "the model has to be captured again for this call, but its weights have changed since it was built, "
                "and would be lost; build the QuantModel with example_inputs like this call's before changing them"
            )
        before, training = dict(self.named_parameters()), self.training
        self._build(example)
        if training != self.original.training:  # otherwise the modes are those of the original, module by module
            self.train(training)
        _keep_parameters(self, before)
        self.note_weights()

    @property
    def has_built_weights(self) -> bool:
        """Whether the weights, here and in the original, are unchanged since the model was built."""
        return self._built_weights == _versions(self)

    def note_weights(self) -> None:
        """The current weights count from now on as those that the model was built with."""
        self._built_weights = _versions(self)

    # --- looking inside

    @property
    def original(self) -> nn.Module:
        """The float model that this one was built from; nothing here changes it."""
        return self._original[0]

    @property
    def example_inputs(self) -> Call | None:
        """The call `(args, kwargs)` that the model was captured with, tensors on the meta device; None without one."""
        return self._example

    @property
    def sites(self) -> dict[str, Quantizer]:
        """The quantizer of every site of `plan`, by the site's name. `replace_quantizer` changes one."""
        found = {quantizer.name: quantizer for quantizer in self.quantizers()}
        return {name: found[name] for name in self.plan if name in found}

    @property
    def is_float_by_plan(self) -> bool:
        """Whether the model was built from a plan without sites, so that all of it is float on purpose."""
        return self._given_plan is not None and not self._given_plan.sites

    @property
    def cfg(self) -> QuantConfig:
        """The config, under its name in the first Sparsebit."""
        return self.config

    @property
    def device(self) -> torch.device:
        """The current device of the model; the config's `DEVICE` is the one that it was built on."""
        return next((parameter.device for parameter in self.parameters()), torch.device(self.config.DEVICE))

    def set_quant(self, w_quant: bool = False, a_quant: bool = False) -> None:
        """Switch weight and activation quantization on or off."""
        wanted = {"weight": w_quant, "activation": a_quant}
        # Uncalibrated ones first, as they raise. Replaced ones last: they must not differ from their replacements.
        quantizers = sorted(self.quantizers(), key=lambda q: (bool(q.replaced_by), q.is_calibrated))
        for quantizer in quantizers:
            if wanted[quantizer.target]:
                quantizer.enable_quant()
        for quantizer in quantizers:
            if not wanted[quantizer.target]:
                quantizer.disable_quant()

    def is_quantized(self, target: Target) -> bool:
        """Whether any quantizer of weights, or of activations, is on. "feature" is the older word for "activation"."""
        wanted = as_target(target)
        return any(q.is_enable for q in self.quantizers() if q.target == wanted)

    def quantizers(self) -> list[Quantizer]:
        """Every quantizer, including those that are switched off for good; `sites` has those of the plan by name."""
        return [module for module in self.model.modules() if isinstance(module, Quantizer)]

    @property
    def coverage(self) -> Coverage:
        """Which layers are quantized, which are float, and why."""
        found = describe_coverage(self.model, self._captured, self.plan)
        return dataclasses.replace(found, notes=(*found.notes, self.unproved)) if self.unproved else found

    @property
    def source(self) -> nn.Module:
        """The copy's own Python code, with the copy's layers."""
        return self._root.source if self._root is not None else self.model


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


def code_modules(qmodel: SimulatedModel) -> list[nn.Module]:
    """Every module whose own Python code may run, including those behind captured graphs."""
    sources = (qmodel.source, *(region.source for region in qmodel._captured.regions.values()))
    return list({id(module): module for source in sources for module in source.modules()}.values())


def folded_tensors(qmodel: SimulatedModel) -> set[int]:
    """The ids of parameters and buffers of layers that were folded into others."""
    folded = (module for module in code_modules(qmodel) if isinstance(module, Absorbed))
    return {id(tensor) for norm in folded for tensor in (*norm.parameters(), *norm.buffers())}


def _versions(qmodel: SimulatedModel) -> tuple[Any, ...]:
    """A value that differs after any change to the weights, in the copy or in the original."""
    models = (qmodel.original, qmodel.model)
    return tuple((id(p), p._version, p.dtype) for module in models for p in module.parameters())


def _keep_parameters(qmodel: SimulatedModel, before: dict[str, nn.Parameter]) -> None:
    """Restore unchanged parameters of the last capture, because an optimizer may hold them."""
    same = {
        id(new): old
        for name, new in qmodel.named_parameters()
        if (old := before.get(name)) is not None and old.shape == new.shape and torch.equal(old, new)
    }
    for module in (*qmodel.modules(), *code_modules(qmodel)):
        for name, parameter in module._parameters.items():
            if id(parameter) in same:
                module._parameters[name] = same[id(parameter)]


def _require_planned_sites(given: Plan, plan: Plan, policy: LeafPolicy, *, was_fitting: bool) -> None:
    missing = given.missing_in(plan)
    if not missing:
        return
    found = f"the plan has {len(missing)} sites that this model has not: {', '.join(missing[:5])}"
    if not policy.own_code and not policy.untouched:
        if was_fitting:
            return
        raise ConfigError(f"{found}; make the plan from this model: QuantModel(model, config).plan")
    warnings.warn(f"{found}: their modules run their own code", stacklevel=users_level())


def _require_same_structure(model: nn.Module, saved: Structure | None, structure: Structure) -> None:
    if saved is not None and (found := difference(saved, structure)):
        raise CheckpointError(
            f"the forward of the {type(model).__name__} given differs from that of the model that was "
            f"saved; give the class that was saved, and the example_inputs that it was built with:\n{found}"
        )


def _warn_of_unmatched_globs(model: nn.Module, config: QuantConfig, plan: Plan) -> None:
    paths = [path for path, _ in model.named_modules()]
    skips = (
        f"SKIP_TRACE_MODULES: the glob {glob!r} matches no module; near names: {', '.join(near_names(glob, paths))}"
        for glob in config.SKIP_TRACE_MODULES
        if not any(LeafPolicy(skip=(glob,)).is_skipped(path) for path in paths)
    )
    for message in (*map(str, config.unmatched_globs(plan.layers)), *skips, *plan.warnings):
        warnings.warn(message, stacklevel=users_level())


def _require_values(model: nn.Module) -> None:
    """Raise if tensors of the model have no values, or if its forward returns none."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    if unmade := [name for name, tensor in tensors if is_lazy(tensor)]:
        raise CaptureError(
            f"the model has lazy layers, whose weights are not there yet ({', '.join(unmade[:3])}); run it once, "
            "model(x), before it is quantized"
        )
    if empty := [name for name, tensor in tensors if tensor.is_meta]:
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        raise CaptureError(
            f"the model is on the meta device, where tensors have shapes and no values ({', '.join(empty[:3])}{more}); "
            "make it on a real device (without torch.device('meta') or init_empty_weights). For load() its weights do "
            "not matter, but buffers that are not saved do"
        )
    if inspect.iscoroutinefunction(model.forward) or inspect.isasyncgenfunction(model.forward):
        raise CaptureError(
            f"{type(model).__name__}.forward is `async def`: a call returns a coroutine, not values; quantize a module "
            "whose forward is a plain function"
        )


def shown(form: CallForm) -> str:
    given = [name for name, value in form.items() if value == VARYING]
    fixed = [f"{name}={value!r}" for name, value in form.items() if value != VARYING and value is not None]
    return ", ".join([*given, *fixed]) or "nothing"


def users_level() -> int:
    """The number of stack levels from the calling function up to the first caller outside this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_passed(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _is_passed(name: str) -> bool:
    return name.startswith("sparsebit.") or name == "contextlib"  # its decorators add stack frames
