"""Outcomes of calls and states of models, compared bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import SparsebitError
from tests.fuzz.values import leaves
from tests.stateful.networks import Call

FORGOTTEN = 99  # the seed of weights that a loaded model must not keep


def named_arguments(model: nn.Module, call: Call) -> dict[str, Any]:
    """The call as keyword arguments."""
    names = [name for name in model.forward.__code__.co_varnames if name != "self"]
    return dict(zip(names, call[0], strict=False)) | call[1]


def outcome(model: nn.Module, call: Call) -> Any:
    """What a call gives, or the refusal."""
    args, kwargs = call
    with torch.no_grad():
        try:
            return model(*args, **kwargs)
        except SparsebitError as refusal:
            return refusal


def tensors(value: Any) -> list[Tensor]:
    return [x for _, x in leaves(value) if isinstance(x, Tensor)]


def is_among(parameter: Tensor, held: dict[str, Tensor]) -> bool:
    return any(value.shape == parameter.shape and torch.equal(value, parameter) for value in held.values())


def assert_same(right: Any, got: Any, what: str, *, limit: float = 0.0, may_refuse: bool = False) -> None:
    """Both refused, or the same numbers: bit for bit unless there is a limit."""
    refused = [isinstance(value, SparsebitError) for value in (right, got)]
    if may_refuse and refused[1]:
        return
    assert refused[0] == refused[1], f"{what}: {got if refused[1] else 'runs'} instead of {right}"
    for one, other in zip(tensors(right), tensors(got), strict=True):
        same = torch.equal(one, other) if not limit else torch.allclose(one, other, rtol=limit, atol=limit)
        assert same, f"{what}: differs by {(one - other).abs().max().item():.3g}"


def assert_same_state(right: dict[str, Tensor], got: dict[str, Tensor], what: str) -> None:
    assert set(right) == set(got), f"{what}: other names in its state: {sorted(set(right) ^ set(got))}"
    changed = [
        name for name in right if right[name].dtype != got[name].dtype or not torch.equal(right[name], got[name])
    ]
    assert not changed, f"{what}: other values: {', '.join(changed)}"
