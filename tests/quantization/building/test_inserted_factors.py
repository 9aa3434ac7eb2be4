from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from sparsebit.errors import CheckpointError
from sparsebit.quantization.building.inserted_factors import InsertedFactor, insert, remove


def test_a_factor_goes_in_and_out_again() -> None:
    root = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Linear(4, 2), nn.ReLU()))
    x = torch.randn(3, 4)
    before = root(x)
    factor = InsertedFactor("twice", "_0", ("_1",), (4,))
    insert(root, [InsertedFactor.from_dict(factor.to_dict())])
    assert torch.equal(root(x), before)
    root.get_submodule("twice").factor.fill_(2.0)
    assert not torch.equal(root(x), before)
    remove(root, [factor])
    assert torch.equal(root(x), before) and not hasattr(root, "twice")


def test_another_architecture_is_refused() -> None:
    root = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    with pytest.raises(CheckpointError, match="nodes that this graph does not have: _1"):
        insert(root, [InsertedFactor("twice", "_0", ("_1",), (4,))])
    with pytest.raises(CheckpointError, match="damaged"):
        InsertedFactor.from_dict({"name": "twice"})
