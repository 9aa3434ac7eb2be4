"""`ObservedCalls`: how each module of a model is called, seen in one forward on an example."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sparsebit.errors import CaptureError
from sparsebit.graph.checking.outcome import cloned, state_kept
from sparsebit.graph.nodes.example import Example
from sparsebit.graph.state.outer_state import undisturbed_outer_state
from sparsebit.graph.values.call_form import (
    VARYING,
    CallForm,
    call_form,
    flattened,
    has_forward,
    same_form,
    signature_of,
)
from sparsebit.graph.values.failures import FAILURES
from sparsebit.graph.values.input_hints import input_hint


class ObservedCalls:
    """How each module is called in one forward: form and example inputs; neither if there are several ways."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.example = Example()
        self.forms: dict[int, CallForm | None] = {}
        self.inputs: dict[int, dict[str, Any]] = {}
        callable_modules = [module for module in model.modules() if has_forward(module)]
        handles = [module.register_forward_pre_hook(self._note, with_kwargs=True) for module in callable_modules]
        try:
            args, kwargs = cloned((args, kwargs))  # the model may write into its inputs
            with torch.no_grad(), undisturbed_outer_state(model), state_kept(model):
                model.eval()
                model(*args, **kwargs)
        except FAILURES as error:
            told = f"it calls sys.exit({error})" if isinstance(error, SystemExit) else error
            hint = input_hint((args, kwargs))
            raise CaptureError(f"{type(model).__name__} does not run on its example_inputs: {told}{hint}") from error
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        form = call_form(module, args, kwargs)
        seen = self.forms.setdefault(id(module), form)
        if seen is not None and not same_form(seen, form):
            self.forms[id(module)] = None
        elif id(module) not in self.inputs:
            given = flattened(signature_of(module).bind(*args, **kwargs))
            varying = {name: given.get(name) for name, value in form.items() if value == VARYING}
            self.inputs[id(module)] = self.example.fake(varying)
