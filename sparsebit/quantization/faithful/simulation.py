"""`SimulatedModel`: a captured copy of a model with quantizers in it, which runs calls of any form.

A call takes one of four ways. The graph of the whole model runs, if there is one and the call has its form. If the call
has another form, the model is captured again, which is only possible while the weights are those of the original. If a
guard fails inside the graph, the model's own code runs with the copy's quantized layers. If the model could not be
traced as a whole, its own code runs, with graphs in the place of the modules that could.

`QuantModel` adds calibration, training and saving through the hooks `_record`, `rebuild` and `capture_again`; proofs
use this class for single modules. Nothing here changes the original.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Self

import torch
from torch import nn

from sparsebit.config.schema import QuantConfig
from sparsebit.config.targets import Target, as_target
from sparsebit.errors import CaptureError
from sparsebit.execution.batches import Call
from sparsebit.graph.checking.outcome import undisturbed_randomness
from sparsebit.graph.nodes.absorbed import Absorbed
from sparsebit.graph.nodes.example import GuardError
from sparsebit.graph.values.call_form import VARYING, CallForm, call_form
from sparsebit.quantization.building.build import Blueprint, Built, build
from sparsebit.quantization.building.coverage import describe_coverage
from sparsebit.quantization.building.float_parameters import FloatParameters
from sparsebit.quantization.faithful.carried_state import AGAIN, LIKE_THIS, BuiltState, CarriedState
from sparsebit.quantization.planning.sites import Plan
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.records import Coverage

log = logging.getLogger(__name__)


class SimulatedModel(nn.Module):
    """A captured copy of a model with quantizers: a `QuantModel`, or a single module that a proof compares."""

    blueprint: Blueprint
    built: Built
    plan: Plan
    model: nn.Module
    unproved = ""  # why the copy may not compute what the model computes; empty if it was proved or not yet compared
    is_calibrating = False  # between prepare_calibration() and calc_qparams()
    # Whether the float model's outputs can no longer be computed: algorithms changed weights before the model was
    # saved, or its batch norms were tuned.
    float_values_are_lost = False
    float_parameters: FloatParameters  # the float model's values of parameters that algorithms have changed
    applied_algorithms: tuple[str, ...] = ()  # algorithms that changed the calibrated model, by name in `ALGORITHMS`

    # --- building

    def _set_up(self, blueprint: Blueprint, example: Call | None, form: CallForm | None = None) -> None:
        self.blueprint = blueprint
        self.float_parameters = FloatParameters()
        self.training = self.original.training
        self._build(example, form)

    @classmethod
    def built_from(cls, blueprint: Blueprint, example: Call | None, form: CallForm | None = None) -> Self:
        """The model of a blueprint, captured for the example or a form of call; nothing is compared."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._set_up(blueprint, example, form)
        return made

    def _build(self, example: Call | None, form: CallForm | None = None) -> None:
        # Parameters that are created in inference mode could never be trained.
        with torch.inference_mode(False), undisturbed_randomness():
            self.built, self.plan = build(self.blueprint, example, form)
            self.model = self.built.model
            self.training = self.model.training  # `rebuild` puts the next copy into this mode
            self._ran_source = False
            self.to(self.config.DEVICE)
        coverage = self.coverage
        log.info("captured: %s; %s", str(coverage).splitlines()[0], coverage.weights)
        self.note_weights()
        self.built_state = BuiltState(self.original, self.source)

    @property
    def call_form(self) -> CallForm | None:
        """The form of the captured call: constant arguments by value, others as VARYING; None without a whole graph."""
        if self.built.root is None:
            return None
        return {**self.built.root.constants, **dict.fromkeys(self.built.root.inputs, VARYING)}

    # --- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.built.root is None:
            output = self.model(*args, **kwargs)
            self._record((args, kwargs))
            return output
        inputs = self.built.root.bind(args, kwargs)
        if inputs is None:  # the call has another form than the captured one
            self.capture_again(args, kwargs)
            return self(*args, **kwargs)
        try:
            output = self.built.root.attempt(inputs)
        except GuardError as error:
            if self.built.inserted_factors:
                raise CaptureError(
                    f"{error}: only the graph has the factors inserted by smoothing; {error.advice}"
                ) from error
            self._warn_of_source(error)
            output, inputs = self.built.root.run_source(args, kwargs), None
        self._record(inputs)
        return output

    def _record(self, call: Any) -> None:
        """Called after every forward with its inputs; None if the forward cannot be repeated from them."""

    def _warn_of_source(self, error: GuardError) -> None:
        if not self._ran_source:
            self._ran_source = True
            text = "%s: the call runs the model's own code, where layers are quantized but operators are not; %s"
            log.warning(text, error, error.advice)

    def capture_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture again for a call of another form than the captured one."""
        assert self.built.root is not None
        form = call_form(self.built.root.source, args, kwargs)
        log.warning("captured again for a call with %s: parameters are new objects; %s", shown(form), LIKE_THIS)
        state = CarriedState.of(self.built_state, self.original, self.source, folded_tensors(self))
        self.rebuild((args, kwargs))
        if self.built.root is not None and self.built.root.bind(args, kwargs) is None:
            raise CaptureError(f"a call with {shown(form)} cannot be captured; see coverage")
        state.put_into(self.source)

    def rebuild(self, example: Call | None) -> None:
        """Capture again; parameters that do not change stay the same objects."""
        if not self.has_built_weights:
            raise CaptureError(f"{AGAIN}, but its weights have changed, and would be lost; before that, {LIKE_THIS}")
        before, training = dict(self.named_parameters()), self.training
        self._build(example)
        # The new copy has the original's modes, module by module; `train` would overwrite them all.
        if training != self.original.training:
            self.train(training)
        _keep_parameters(self, before)
        self.note_weights()

    @property
    def has_built_weights(self) -> bool:
        """Whether the weights of the copy and of the original are unchanged since the model was built."""
        return self._built_weights == _versions(self)

    def note_weights(self) -> None:
        """From now on treat the current weights as those that the model was built with."""
        self._built_weights = _versions(self)

    # --- looking inside

    @property
    def original(self) -> nn.Module:
        """The float model that this one was built from; nothing here changes it."""
        return self.blueprint.original

    @property
    def config(self) -> QuantConfig:
        return self.blueprint.config

    @config.setter
    def config(self, config: QuantConfig) -> None:
        self.blueprint.config = config

    @property
    def example_inputs(self) -> Call | None:
        """The call `(args, kwargs)` that the model was captured with, tensors on the meta device; None without one."""
        return self.built.example

    @property
    def sites(self) -> dict[str, Quantizer]:
        """The quantizer of every site of `plan`, by the site's name. `replace_quantizer` changes one."""
        found = {quantizer.name: quantizer for quantizer in self.quantizers()}
        return {name: found[name] for name in self.plan if name in found}

    @property
    def is_float_by_plan(self) -> bool:
        """Whether the model was built from a plan without sites, so that all of it is float on purpose."""
        return self.blueprint.plan is not None and not self.blueprint.plan.sites

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
        # Uncalibrated quantizers come first: they raise, and then nothing has been switched. Replaced ones come last:
        # they check that their replacements are switched already.
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
        """Every quantizer, including those that are permanently off; `sites` has those of the plan by name."""
        return [module for module in self.model.modules() if isinstance(module, Quantizer)]

    @property
    def coverage(self) -> Coverage:
        """Which layers are quantized, which are float, and why."""
        found = describe_coverage(self.model, self.built.captured, self.plan)
        return dataclasses.replace(found, notes=(*found.notes, self.unproved)) if self.unproved else found

    @property
    def source(self) -> nn.Module:
        """The copy's own Python code, with the copy's layers."""
        return self.built.root.source if self.built.root is not None else self.model


def code_modules(qmodel: SimulatedModel) -> list[nn.Module]:
    """The modules of the copy's own code, and of the code that each graph replaces."""
    sources = (qmodel.source, *(region.source for region in qmodel.built.captured.regions.values()))
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


def shown(form: CallForm) -> str:
    """A call's form for messages: the arguments that vary, then the constants other than None."""
    given = [name for name, value in form.items() if value == VARYING]
    fixed = [f"{name}={value!r}" for name, value in form.items() if value != VARYING and value is not None]
    return ", ".join([*given, *fixed]) or "nothing"
