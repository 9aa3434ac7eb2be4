"""Channel groups of small nets: how many units there are, and that what is removed is equal to what is masked."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparsebit.errors import CaptureError
from sparsebit.sparse.channels.groups import drawn
from sparsebit.sparse.group_search import find_groups
from sparsebit.sparse.proof.bench import mask_units
from sparsebit.sparse.proof.group_analysis import analysed
from sparsebit.sparse.shrinking.surgery import apply_plan
from tests.sparse.nets import PRUNABLE, SPARED, WIDE, Auxiliary, Caching, PaddedShortcut, images


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", PRUNABLE)
def test_units_can_be_removed(name: str) -> None:
    build, num_units = PRUNABLE[name]
    model, batch = build()
    model.eval()
    state = copy.deepcopy(model.state_dict())
    found = find_groups(model, batch)
    assert len(found.units) == num_units, str(found)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])
    for seed in range(3):
        dead = drawn(found.groups, 0.4, torch.Generator().manual_seed(seed))
        masked, shrunk = copy.deepcopy(model), copy.deepcopy(model)
        mask_units(masked, dead)
        apply_plan(shrunk, found.plan(dead))
        assert type(shrunk) is type(model)
        assert sum(p.numel() for p in shrunk.parameters()) < sum(p.numel() for p in model.parameters())
        assert torch.allclose(masked(batch), shrunk(batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SPARED)
def test_what_cannot_be_proved_is_spared_with_the_reason(name: str) -> None:
    build, words = SPARED[name]
    model, batch = build()
    found = find_groups(model.eval(), batch)
    assert ("a.weight", 0) not in {axis for group in found.groups for axis in group.axes}
    reasons = [entry.reason for entry in found.spared if (entry.tensor, entry.dim) == ("a.weight", 0)]
    assert reasons and words in reasons[0]
    assert reasons[0] in str(found)


def test_the_others_stay_prunable_beside_a_group_that_fails() -> None:
    build, _ = WIDE["size in the code"]
    model, batch = build()
    found = find_groups(model.eval(), batch)
    assert {axis for group in found.groups for axis in group.axes} >= {("b.weight", 0), ("c.weight", 0)}


def test_a_padded_shortcut_ties_the_channels_that_it_carries() -> None:
    found = find_groups(PaddedShortcut().eval(), images())
    rows = [{tensor: places for tensor, dim, places in unit.members if dim == 0} for unit in found.units]
    pairs = {(row["stem.weight"], row["b.weight"]) for row in rows if "stem.weight" in row}
    assert pairs == {((place,), (place + 4,)) for place in range(8)}
    spared = [entry for entry in found.spared if (entry.tensor, entry.dim) == ("b.weight", 0)]
    assert sum(entry.num_positions for entry in spared) == 8


def test_a_head_of_training_follows() -> None:
    model, batch = Auxiliary(), images()
    found = find_groups(model.eval(), batch)
    dead = found.units[:3]
    apply_plan(model, found.plan(dead))
    for output in model.train()(batch):
        assert output.shape == (2, 3)


def test_a_model_that_does_not_run_is_refused() -> None:
    with pytest.raises(CaptureError, match="does not run on the example inputs"):
        find_groups(PaddedShortcut(), torch.randn(2, 4, 4, 4))


def test_a_value_that_the_model_keeps_from_run_to_run_is_seen_in_every_analysis() -> None:
    model, call = Caching().eval(), ((images(),), {})
    for _ in range(2):
        found = analysed(model, call, {}, {})
        assert {tensor for unit in found.units for tensor, _, _ in unit.members} >= {"a.weight", "scale", "b.weight"}


class NeedsFour(nn.Module):
    """A net that takes the rows of a batch in fours."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 10), nn.Linear(40, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).reshape(x.shape[0] // 4, -1))


def test_a_proof_takes_two_samples_of_a_large_batch() -> None:
    found = find_groups(PaddedShortcut().eval(), torch.randn(64, 3, 4, 4))
    assert found.bench.call[0][0].shape[0] == 2
    assert len(found.units) == 24


def test_a_batch_stays_whole_where_the_model_needs_it() -> None:
    found = find_groups(NeedsFour().eval(), torch.randn(8, 6))
    assert found.bench.call[0][0].shape[0] == 8
