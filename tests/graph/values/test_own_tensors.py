from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebit.graph.values.own_tensors import with_own_tensors


def temporary_view() -> Tensor:
    return torch.randn(2, 3).view(6)


def test_a_view_of_a_temporary_becomes_a_tensor_of_its_own() -> None:
    with torch.no_grad():
        view = temporary_view()
        own = with_own_tensors(view, torch.randn(2))
    assert not own._is_view() and own.data_ptr() == view.data_ptr() and own.shape == view.shape
    own.mul_(torch.tensor(2.0, requires_grad=True))
    assert own.requires_grad


def test_views_inside_containers() -> None:
    with torch.no_grad():
        output = with_own_tensors({"a": temporary_view(), "b": (temporary_view(), 3)}, ())
    assert not output["a"]._is_view() and not output["b"][0]._is_view() and output["b"][1] == 3


def test_views_of_inputs_and_of_one_another_stay() -> None:
    x = torch.randn(2, 3)
    with torch.no_grad():
        view, halves = x.view(6), temporary_view().chunk(2)
        assert with_own_tensors(view, {"x": x}) is view
        assert all(half._is_view() for half in with_own_tensors(halves, x))


@pytest.mark.parametrize("mode", [torch.enable_grad(), torch.inference_mode()], ids=["gradients", "inference"])
def test_other_modes_have_no_such_views(mode: Any) -> None:
    with mode:
        view = temporary_view()
        assert with_own_tensors(view, ()) is view
