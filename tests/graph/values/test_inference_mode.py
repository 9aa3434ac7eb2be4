from __future__ import annotations

import copy

import torch
from torch import nn

from sparsebit.graph.values.copying import copy_model
from sparsebit.graph.values.inference_mode import as_ordinary, ordinary_model, ordinary_tensors


def made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def is_ordinary(model: nn.Module) -> bool:
    return not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))


def test_inside_tensors_are_ordinary_and_modes_stay() -> None:
    with torch.inference_mode(), ordinary_tensors():
        assert not torch.zeros(1).is_inference() and not torch.is_grad_enabled()
    with ordinary_tensors():
        assert torch.is_grad_enabled()


def test_tensors_of_a_batch_are_copied_only_where_they_must() -> None:
    plain = [torch.ones(2)]
    assert as_ordinary(plain) is plain
    with torch.inference_mode():
        batch = {"x": torch.ones(2)}
        found = as_ordinary(batch)["x"]
    assert not found.is_inference() and found.equal(torch.ones(2)) and batch["x"].is_inference()


def test_a_copy_made_in_inference_mode_can_be_trained() -> None:
    model = made_in_inference_mode()
    with torch.inference_mode():
        copied, other = copy_model(model), ordinary_model(model)
    for own in (copied, other):
        assert is_ordinary(own)
        own(torch.randn(8, 4)).sum().backward()
        assert all(parameter.grad is not None for parameter in own.parameters())
    plain = copy.deepcopy(copied)
    assert ordinary_model(plain) is plain
