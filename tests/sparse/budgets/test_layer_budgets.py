"""What layers take of a budget: numbers of one sample, whatever the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsebit.errors import BudgetError
from sparsebit.sparse import SparseModel, model_size


@pytest.mark.parametrize("num_samples", [1, 8])
@pytest.mark.parametrize(("name", "limit"), [("macs", 0.05), ("macs", 39.2), ("bytes", 0.01)])
def test_errors_have_the_numbers_of_one_sample(name: str, limit: float, num_samples: int) -> None:
    pytest.importorskip("scipy")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 4))
    batch = torch.randn(num_samples, 6)
    size = getattr(model_size(model, batch), name)
    smodel = SparseModel(model, {"DEVICE": "cpu"}, batch)
    with pytest.raises(BudgetError) as caught:
        smodel.choose_ratios({name: limit}, [batch])
    allowed, least = {"macs": (39.2, 88), "bytes": (0.01 * size, 420)}[name]
    assert f"{name}: {allowed:.6g} allowed, {least} is the least" in str(caught.value)
