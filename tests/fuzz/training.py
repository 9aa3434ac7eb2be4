"""A training step of the copy has the gradients of the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.graph.checking.outcome import state_kept
from sparsebit.quantization import QuantModel
from tests.fuzz.calls import (
    CLOSE_GRADIENT,
    EXACT,
    KEEPING,
    UNSTABLE,
    Different,
    Invalid,
    Leaves,
    Told,
    compare,
    floor,
    run_call,
    seed,
    sensitivity,
)
from tests.fuzz.noise import Noise
from tests.fuzz.program import Compiled, Program
from tests.fuzz.values import first_difference, frozen, leaves

OVERWRITTEN = "a write through .data changes what the model's backward reads, not what the copy's does"


def _step(compiled: Compiled, model: nn.Module, call: int, parameters: dict[str, Tensor]) -> Leaves:
    """One forward and backward: outputs, and the gradients of parameters (by the given names) and inputs."""
    args, kwargs = compiled.inputs(call)
    bases: list[Tensor] = []

    def differentiable(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        bases.append(x.requires_grad_())
        return x * 1  # no leaf: the model may write into it

    args, kwargs = pytree.tree_map_only(Tensor, differentiable, _opened((args, kwargs)))
    for parameter in parameters.values():
        parameter.grad = None
    seed(call)
    output = model(*_closed(args), **_closed(kwargs))
    tensors = [(path, x) for path, x in leaves(output) if isinstance(x, Tensor)]
    outputs = [(path, x) for path, x in tensors if x.is_floating_point() and x.requires_grad]
    loss = sum((x * torch.cos(torch.arange(x.numel())).reshape(x.shape)).sum() for _, x in outputs)
    if isinstance(loss, Tensor):
        loss.backward()
    gradients = {name: _gradient(parameter) for name, parameter in parameters.items()}
    return frozen(
        {
            "output": output,
            "learns": [path for path, _ in outputs],
            "gradient": gradients,
            "input_gradient": [_gradient(base) for base in bases],
        }
    )


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


# A dataclass as a dict, which pytree can map over, and back.


def _opened(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"__dataclass__": type(value), **{f.name: getattr(value, f.name) for f in dataclasses.fields(value)}}
    if isinstance(value, dict):
        return {key: _opened(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_opened(item) for item in value)
    return value


def _closed(value: Any) -> Any:
    if isinstance(value, dict) and "__dataclass__" in value:
        return value["__dataclass__"](**{key: item for key, item in value.items() if key != "__dataclass__"})
    if isinstance(value, dict):
        return {key: _closed(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_closed(item) for item in value)
    return value


def _matched(model: nn.Module, qmodel: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's parameters and the copy's, by the model's names: matched by value, as no two are alike.

    Parameters that the copy holds in another form (the parts of an attention's projection) are left out.
    """
    theirs: dict[str, Tensor] = {}
    ours = dict(model.named_parameters())
    copies = [p for _, p in qmodel.named_parameters()]
    for name, parameter in ours.items():
        for index, other in enumerate(copies):
            if other.shape == parameter.shape and torch.equal(other, parameter):
                theirs[name] = copies.pop(index)
                break
    return {name: ours[name] for name in theirs}, theirs


def gradients(program: Program, compiled: Compiled) -> None:
    """A training step's gradients: quantization off, at 16 bits, and on the accelerated path."""
    model = compiled.make().train()
    try:
        for call in (0, 1):
            run_call(compiled, model, call)
    except Exception as fault:
        raise Invalid(f"{type(fault).__name__}: {fault}") from fault
    qmodel = QuantModel(compiled.make().train(), KEEPING).train()
    for call in (0, 1):  # a call of another form captures anew, with other parameters
        run_call(compiled, qmodel, call)
    ours, theirs = _matched(model, qmodel)
    try:
        expected = [_step(compiled, model, call, ours) for call in (0, 1)]
        for call in (2, 3):
            _step(compiled, model, call, {})
        expected += [_step(compiled, model, call, ours) for call in (4, 5)]
    except Exception as fault:
        raise Invalid(f"{type(fault).__name__}: {fault}") from fault
    reads_overwritten = _reads_overwritten(compiled, expected, list(ours))
    if "eval branch" in " ".join(qmodel.coverage.notes):
        raise Told("an eval branch was captured")
    for call in (0, 1):
        got = _step(compiled, qmodel, call, theirs)
        if first_difference(expected[call], got, EXACT * 10, floor(expected[call])):
            if reads_overwritten:
                raise Told(OVERWRITTEN)
            if first_difference(expected[call], _rounded_steps(compiled)[call], EXACT * 10, floor(expected[call])):
                raise Told("unstable: a last digit of the parameters moves the float gradients as far")
        compare(call, expected[call], got, EXACT * 10, "training, quantization off")
    qmodel.prepare_calibration()
    qmodel.train()
    for call in (2, 3):  # as in training: a model may ask whether its input is a leaf
        _step(compiled, qmodel, call, {})
    qmodel.calc_qparams()
    _widen(qmodel)
    _, theirs = _matched(model, qmodel)  # where a part of the copy gave way to the model's own code, they are new ones
    qmodel.train()
    qmodel.set_quant(w_quant=True, a_quant=True)
    qmodel.accelerate(False)
    with state_kept(qmodel.model, qmodel.source):  # both paths start from the same
        plain = [_step(compiled, qmodel, call, theirs) for call in (4, 5)]
    qmodel.accelerate()
    for call, right in zip((4, 5), plain, strict=True):
        accelerated = _step(compiled, qmodel, call, theirs)
        compare(call, right, accelerated, 1e-3, "16 bits, the accelerated training path against the plain one")
    for call, right, got in zip((4, 5), expected[2:], plain, strict=True):
        found = first_difference(right, got, CLOSE_GRADIENT, floor(right))
        if found:
            if reads_overwritten:
                raise Told(OVERWRITTEN)
            runs = [_disturbed_steps(compiled, seed)[call - 4] for seed in range(4)]
            if sensitivity(right, [got]) <= UNSTABLE * sensitivity(right, runs):
                raise Told("unstable: 16-bit noise moves the float gradients as far")
            raise Different(f"call {call}, training at 16 bits: {found}")


def _reads_overwritten(compiled: Compiled, expected: list[Leaves], names: list[str]) -> bool:
    """Whether the model's own backward reads values that its forward has overwritten since, unseen by autograd."""
    model = compiled.make().train()
    parameters = {name: model.get_parameter(name) for name in names}
    try:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
            for call in (0, 1):
                run_call(compiled, model, call)
            found = [_step(compiled, model, call, parameters) for call in range(6)]
    except torch.utils.checkpoint.CheckpointError:  # it has hooks of its own
        return False
    return any(
        first_difference(right, own, EXACT * 10, floor(right))
        for right, own in zip(expected, found[:2] + found[4:], strict=True)
    )


def _widen(qmodel: QuantModel) -> None:
    """Ranges with a margin: what rounds to just beyond the end of its range has no gradient, rightly."""
    with torch.no_grad():
        for quantizer in qmodel.quantizers():
            quantizer.scale.mul_(1.01)


def _rounded_steps(compiled: Compiled) -> list[Leaves]:
    """The first steps with other last digits of the parameters."""
    model = compiled.make().train()
    for call in (0, 1):
        run_call(compiled, model, call)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-6 * torch.rand_like(parameter))
    names = dict(model.named_parameters())
    return [_step(compiled, model, call, names) for call in (0, 1)]


def _disturbed_steps(compiled: Compiled, seed: int) -> list[Leaves]:
    noise = Noise(seed)
    model = noise.disturb(compiled.make().train())
    names = dict(model.named_parameters())
    with noise:
        for call in (0, 1):
            _step(compiled, model, call, names)
        for call in (2, 3):
            _step(compiled, model, call, {})
        return [_step(compiled, model, call, names) for call in (4, 5)]
