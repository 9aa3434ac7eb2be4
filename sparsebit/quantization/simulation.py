"""`SimulatedModel`: a captured copy of a model with quantizers in it, which runs calls of any form."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from sparsebit.config.reading import Source
from sparsebit.config.schema import QuantConfig
from sparsebit.config.selectors import near_names
from sparsebit.config.targets import Target, as_target
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.errors import CaptureError, ConfigError
from sparsebit.execution.batches import Call, as_call
from sparsebit.graph.call_form import VARYING, CallForm, call_form
from sparsebit.graph.capture import Captured
from sparsebit.graph.copying import uncompiled
from sparsebit.graph.example import GuardError
from sparsebit.graph.inference_mode import ordinary_model
from sparsebit.graph.leaf_policy import LeafPolicy
from sparsebit.graph.outcome import undisturbed_randomness
from sparsebit.graph.passes.fold_batchnorm import Absorbed
from sparsebit.graph.region import Region
from sparsebit.quantization.coverage import describe_coverage
from sparsebit.quantization.inserted_factors import InsertedFactor
from sparsebit.quantization.ops.registration import registered_module_types
from sparsebit.quantization.quant_config import as_qconfig, require_device
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.site_changes import quantizers_by_site
from sparsebit.quantization.sites import Plan
from sparsebit.quantization.stages import Transform, attach, capture, make_plan, prepare, transform
from sparsebit.records import Coverage

log = logging.getLogger(__name__)


class SimulatedModel(nn.Module):
    """A copy of `model` with quantizers where the config and the backend want them; `model` itself is never changed.

    Optional arguments of `forward` are taken as not given until a call or `example_inputs` shows otherwise.
    `example_inputs`, one batch, also lets modules be captured that are called with optional arguments inside code that
    cannot be traced.
    """

    model: nn.Module
    applied_algorithms: tuple[str, ...] = ()  # what has changed the calibrated model, by the names of `ALGORITHMS`

    def __init__(
        self,
        model: nn.Module,
        config: Source | QuantConfig | None = None,
        *,
        plan: Plan | None = None,
        transforms: Sequence[Transform] = (),
        example_inputs: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise CaptureError(f"QuantModel wants an nn.Module, not {type(model).__name__}")
        if any(isinstance(module, SimulatedModel) for module in model.modules()):
            raise CaptureError("the model is, or holds, a QuantModel, which is quantized already; give the float model")
        if isinstance(model, torch.jit.ScriptModule):
            raise CaptureError(
                "the model is TorchScript (torch.jit.script or torch.jit.trace), which has no Python code to capture; "
                "give the nn.Module that it was made from"
            )
        tensors = (*model.named_parameters(), *model.named_buffers())
        if unmade := [name for name, tensor in tensors if is_lazy(tensor)]:
            raise CaptureError(
                f"the model has lazy layers, whose weights are not there yet ({', '.join(unmade[:3])}); run it once, "
                "model(x), before it is quantized"
            )
        if (config is None) == (plan is None):
            raise ConfigError("QuantModel wants a config, or a plan, which holds its config: give one of the two")
        example = None if example_inputs is None else as_call(example_inputs, model)
        wanted = config if plan is None else plan.config
        assert wanted is not None
        self._set_up(model, as_qconfig(wanted), example, plan=plan, transforms=transforms)

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
        self.config, self._given_plan, self._transforms = config, plan, tuple(transforms)
        # In a tuple, so that it is no child module. It is kept to capture again if a call has another form.
        model = ordinary_model(uncompiled(model))
        self._original = (model,)
        self.training = model.training  # when the model is captured again, all modules are put into this mode
        self._policy = policy or self._leaf_policy(config)
        self._build(example, form)

    @staticmethod
    def _leaf_policy(config: QuantConfig, **cuts: Mapping[str, str]) -> LeafPolicy:
        return LeafPolicy(config.SKIP_TRACE_MODULES, registered_module_types(), **cuts)

    def _build(self, example: Call | None, form: CallForm | None = None) -> None:
        """Capture, plan, attach. An example on the meta device has shapes only: its values are zeros."""
        # Parameters that are made in inference mode could never be trained.
        with torch.inference_mode(False), undisturbed_randomness():
            self._build_trainable(example, form)

    def _build_trainable(self, example: Call | None, form: CallForm | None) -> None:
        model = self.original
        device = next((p.device for p in model.parameters()), torch.device(self.config.DEVICE))
        example = pytree.tree_map_only(
            Tensor, lambda x: torch.zeros_like(x, device=device) if x.is_meta else x.to(device), example
        )
        captured = self._capture(example, form)
        plan, placement = make_plan(captured, self.config)
        plan = plan if self._given_plan is None else self._given_plan.fitted(plan)
        plan = attach(captured, plan, placement, example=example, given=self._given_plan)
        self._require_planned_sites(plan)
        for region in captured.regions.values():
            region.graph_module.note_leaves()
        self._captured, self.plan = captured, plan
        self._example: Call | None = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), example)
        self._folded_layers: list[str] = []  # by batch-norm tuning
        self._inserted_factors: tuple[InsertedFactor, ...] = ()
        self._ran_source = False
        self.model = captured.model.graph_module if isinstance(captured.model, Region) else captured.model
        self.training = self.model.training  # used when the model is captured again
        self.to(self.config.DEVICE)
        self._tell(plan)

    def _require_planned_sites(self, plan: Plan) -> None:
        missing = [] if self._given_plan is None else self._given_plan.missing_in(plan)
        if not missing:
            return
        told = f"the plan has {len(missing)} sites that this model has not: {', '.join(missing[:5])}"
        if not self._policy.own_code and not self._policy.untouched:
            raise ConfigError(f"{told}; make the plan from this model: QuantModel(model, config).plan")
        warnings.warn(f"{told}: their modules run their own code", stacklevel=users_level())

    def _capture(self, example: Call | None, form: CallForm | None) -> Captured:
        """The captured model, ready for a plan. A module whose graph cannot be made ready runs its own code."""
        while True:
            captured = capture(self.original, self._policy, example=example, form=form)
            folds, schedule = self._folds_batchnorm(), self.config.SCHEDULE
            reasons = prepare(
                captured,
                folds_batchnorm=folds,
                merges_branches=folds and schedule.MERGE_BRANCHES,
                folds_scales=folds and schedule.FOLD_SCALES,
            )
            if not reasons:
                transform(captured, self._transforms)
                return captured
            for path, reason in reasons.items():
                self._policy = self._policy.cut(path, reason)

    def _folds_batchnorm(self) -> bool:
        if self.config.without_batchnorm_tuning is not None:
            return False
        if self.config.is_set("SCHEDULE.FUSE_BN"):
            return self.config.SCHEDULE.FUSE_BN
        return PROFILES[self.config.BACKEND].folds_batchnorm

    def _tell(self, plan: Plan) -> None:
        paths = [path for path, _ in self.original.named_modules()]
        skips = (
            f"SKIP_TRACE_MODULES: the glob {glob!r} matches no module; near names: {', '.join(near_names(glob, paths))}"
            for glob in self.config.SKIP_TRACE_MODULES
            if not any(LeafPolicy(skip=(glob,)).is_skipped(path) for path in paths)
        )
        for message in (*map(str, self.config.unmatched_globs(plan.layers)), *skips, *plan.warnings):
            warnings.warn(message, stacklevel=users_level())
        coverage = self.coverage
        log.info("captured: %s; %s", str(coverage).splitlines()[0], coverage.weights)

    @property
    def _root(self) -> Region | None:
        """The graph of the whole model; None where the model itself could not be traced."""
        return self._captured.regions.get("")

    @property
    def call_form(self) -> CallForm | None:
        """How `forward` is called: constants by value, the other parameters as varying; None for an opaque model."""
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
                    f"{error}, and this call differs: the model's own code cannot run in the place of the graph, which "
                    "has multiplications that were inserted by smoothing; build the QuantModel with example_inputs "
                    "like this call's"
                ) from error
            self._warn_of_source(error)
            output, inputs = self._root.run_source(args, kwargs), None
        self._record(inputs)
        return output

    def _record(self, call: Any) -> None:
        """Called after every forward with its inputs; None where the forward cannot be repeated from them."""

    def _warn_of_source(self, error: GuardError) -> None:
        if not self._ran_source:
            self._ran_source = True
            log.warning(
                "%s, and this call differs: it runs the model's own code, where layers are quantized but functions and "
                "operators are not; build the QuantModel with example_inputs like this call's",
                error,
            )

    def _capture_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture again for a call of another form than the captured one."""
        assert self._root is not None
        form = call_form(self._root.source, args, kwargs)
        log.warning(
            "captured again for a call that gives %s: parameters are new objects; build the QuantModel with "
            "example_inputs like this call's to avoid it",
            shown(form),
        )
        self._rebuild((args, kwargs))
        if self._root is not None and self._root.bind(args, kwargs) is None:
            raise CaptureError(f"a call that gives {shown(form)} cannot be captured; see coverage")

    def _rebuild(self, example: Call | None) -> None:
        training = self.training
        self._build(example)
        if training != self.original.training:  # else the modes are those of the original, module by module
            self.train(training)

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
        return quantizers_by_site(self.model, self.plan)

    @property
    def is_float_by_plan(self) -> bool:
        """Whether the model was built from a plan without sites: all of it is meant to be float."""
        return self._given_plan is not None and not self._given_plan.sites

    @property
    def cfg(self) -> QuantConfig:
        """The config, by the name that the first Sparsebit had for it."""
        return self.config

    @property
    def device(self) -> torch.device:
        """The device of the model now; the config's `DEVICE` is the one that it was built on."""
        return next((parameter.device for parameter in self.parameters()), torch.device(self.config.DEVICE))

    def set_quant(self, w_quant: bool = False, a_quant: bool = False) -> None:
        """Switch weight and activation quantization on or off."""
        wanted = {"weight": w_quant, "activation": a_quant}
        # Uncalibrated ones first, as they refuse. Replaced ones last: they refuse to differ from their replacements.
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
        """Every quantizer, those that are off for good among them; `sites` has those of the plan by name."""
        return [module for module in self.model.modules() if isinstance(module, Quantizer)]

    @property
    def coverage(self) -> Coverage:
        """What is quantized, what is float and why."""
        return describe_coverage(self.model, self._captured, self.plan)

    def _code_modules(self) -> list[nn.Module]:
        """Every module whose own Python code may run, those behind captured graphs among them."""
        sources = (self.source, *(region.source for region in self._captured.regions.values()))
        return list({id(module): module for source in sources for module in source.modules()}.values())

    def _folded_tensors(self) -> set[int]:
        """The ids of parameters and buffers of layers whose part others compute."""
        folded = (module for module in self._code_modules() if isinstance(module, Absorbed))
        return {id(tensor) for norm in folded for tensor in (*norm.parameters(), *norm.buffers())}

    @property
    def source(self) -> nn.Module:
        """The copy's own Python code, with the copy's layers."""
        return self._root.source if self._root is not None else self.model


def shown(form: CallForm) -> str:
    given = [name for name, value in form.items() if value == VARYING]
    fixed = [f"{name}={value!r}" for name, value in form.items() if value != VARYING and value is not None]
    return ", ".join([*given, *fixed]) or "nothing"


def users_level() -> int:
    """How far up the stack, from the function that asks, the first caller outside this package is."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_passed(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _is_passed(name: str) -> bool:
    return name.startswith("sparsebit.") or name == "contextlib"  # whose decorators stand in between
