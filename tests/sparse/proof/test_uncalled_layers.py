"""Layers that the example does not call lose the channels that their siblings lose, so that every path runs."""

from __future__ import annotations

import pytest
import torch

from sparsebit.sparse import SparseModel, find_groups
from tests.sparse.nets import Chain, images
from tests.stateful.comparing import named_arguments, tensors
from tests.stateful.networks import NETWORKS


@torch.no_grad()
@pytest.mark.parametrize("name", ["chosen by number", "levels", "optional"])
def test_the_smaller_model_is_the_masked_one_where_other_layers_run(name: str) -> None:
    network = NETWORKS[name]
    model, calls = network.fresh(), network.some_calls()
    config = {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "RATIO": 0.5}}
    smodel = SparseModel(model, config, example_inputs=named_arguments(model, calls[0])).eval()
    smodel.calc_params()
    small = smodel.shrink().eval()
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    for args, kwargs in calls:
        for right, got in zip(tensors(smodel(*args, **kwargs)), tensors(small(*args, **kwargs)), strict=True):
            torch.testing.assert_close(got, right)


def test_code_of_this_library_is_no_path_of_the_model() -> None:
    assert not find_groups(Chain().eval(), images()).notes
