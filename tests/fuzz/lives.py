"""What happens to a model besides calls: both modes, plain attributes that change, pruning."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
from torch import nn

from sparsebit.quantization import QuantModel
from sparsebit.sparse import SparseModel, load, save
from tests.fuzz.calls import (
    EXACT,
    KEEPING,
    Invalid,
    Leaves,
    Told,
    compare,
    exact_limit,
    reference,
    run_call,
    without_hooks,
)
from tests.fuzz.guards import KNOB
from tests.fuzz.program import Compiled, Program

CHANNELS = {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "STRATEGY": "l1norm", "RATIO": 0.5}}
ELEMENTS = {"DEVICE": "cpu", "SPARSER": {"TYPE": "unstructured", "STRATEGY": "l1norm", "RATIO": 0.5}}


def forgotten(compiled: Compiled) -> nn.Module:
    """A model with other weights, which a loaded one must not keep."""
    model = compiled.make()
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data + torch.randn(parameter.shape, generator=generator)
    return model


def modes(program: Program, compiled: Compiled) -> None:
    """Train and eval take turns, with quantization off: the copy computes what the model does in each mode."""
    turns = (False, True, True, False)
    model, expected = compiled.make(), []
    try:
        for call, train in enumerate(turns):
            expected.append(run_call(compiled, model.train(train), call))
    except Exception as fault:
        raise Invalid(f"{type(fault).__name__}: {fault}") from fault
    qmodel = QuantModel(compiled.make(), KEEPING)
    for call, train in enumerate(turns):
        got = run_call(compiled, qmodel.train(train), call)
        if train and "eval branch" in " ".join(qmodel.coverage.notes):
            raise Told("an eval branch was captured")
        compare(call, expected[call], got, 10 * exact_limit(compiled), f"{'train' if train else 'eval'} mode")


def attributes(program: Program, compiled: Compiled) -> None:
    """A plain attribute that is changed after the build acts, or is refused."""
    if "knob" not in program.features:
        return
    reference(compiled, 2)
    model = compiled.make()
    qmodel = QuantModel(model, KEEPING, example_inputs=program.shape_of_example(*compiled.inputs(0)))
    run_call(compiled, qmodel, 0)
    run_call(compiled, right := compiled.make(), 0)
    knobs = [(path, name) for path, module in right.named_modules() for name in vars(module) if name.startswith(KNOB)]
    for path, name in knobs:
        setattr(right.get_submodule(path), name, 3.0)
        try:
            setattr(qmodel.model.get_submodule(path), name, 3.0)
        except AttributeError as refusal:  # a block without layers is not in the copy
            raise Told(str(refusal)) from refusal
    compare(1, run_call(compiled, right, 1), run_call(compiled, qmodel, 1), exact_limit(compiled), "another attribute")


def pruned(program: Program, compiled: Compiled) -> None:
    """Pruned copies are equal to the masked model: smaller, saved and loaded, copied."""
    reference(compiled, 4)
    example = program.shape_of_example(*compiled.inputs(0))
    masked = SparseModel(compiled.make(), ELEMENTS, example_inputs=example).eval()
    masked.calc_params()
    _same_calls(compiled, masked, copy.deepcopy(masked), "a deep copy with masks", 0.0)
    smodel = SparseModel(compiled.make(), CHANNELS, example_inputs=example).eval()
    smodel.calc_params()
    small = smodel.shrink().eval()
    _same_calls(compiled, smodel.masked_model().eval(), small, "the smaller model", 10 * exact_limit(compiled))
    if "state" in program.features or "hook" in program.features:
        return  # attributes of Python are in no state_dict
    with tempfile.TemporaryDirectory() as folder:
        save(small, f"{folder}/small")
        loaded = load(f"{folder}/small", forgotten(compiled)).eval()
    _same_calls(compiled, smodel.shrink().eval(), loaded, "the smaller model, saved and loaded", EXACT)


def _same_calls(compiled: Compiled, right: Any, other: Any, what: str, limit: float) -> None:
    """What hooks recorded is compared in models of the same widths alone: they see the inputs of layers."""
    has_widths = what.startswith("the smaller model") and "saved" not in what
    for call in (2, 3):
        expected: Leaves = run_call(compiled, right, call)
        got = run_call(compiled, other, call)
        if has_widths:
            expected, got = without_hooks(expected), without_hooks(got)
        compare(call, expected, got, limit, what)
