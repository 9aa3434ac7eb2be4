"""Plans: what they hold, how two follow each other, and the attributes that follow the shapes."""

from __future__ import annotations

import json

import pytest
import torch

from sparsebit.errors import CheckpointError
from sparsebit.sparse.group_search import find_groups
from sparsebit.sparse.shrinking.surgery import ChannelPlan, apply_plan, plan_of
from tests.sparse.nets import Attention, Chain, Depthwise, Norms, images


def test_a_plan_survives_json() -> None:
    plan = ChannelPlan({"a.weight": {0: (0, 1, 2, 5, 7), 1: ()}}, {"attention": {"num_heads": 3, "shape": (2, 4)}})
    again = ChannelPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.kept == plan.kept
    assert again.attributes == {"attention": {"num_heads": 3, "shape": [2, 4]}}
    assert plan.to_json()["kept"]["a.weight"]["0"] == [[0, 2], [5, 5], [7, 7]]


@pytest.mark.parametrize("value", [{}, {"kept": {"a": {"x": []}}, "attributes": {}}, {"kept": [], "attributes": {}}])
def test_a_damaged_plan_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        ChannelPlan.from_json(value)


def test_attributes_of_layers_follow_their_shapes() -> None:
    model = Depthwise().eval()
    found = find_groups(model, images())
    apply_plan(model, found.plan(found.units[:3]))
    assert (model.a.out_channels, model.dw.in_channels, model.dw.out_channels, model.dw.groups) == (5, 5, 10, 5)
    assert model.c.in_channels == 10
    norms = Norms().eval()
    found = find_groups(norms, images())
    apply_plan(norms, found.plan(group.units[0] for group in found.groups))
    assert (norms.group.num_groups, norms.group.num_channels) == (7, 14)
    assert (norms.instance.num_features, norms.prelu.num_parameters) == (11, 7)


def test_an_attribute_of_the_users_module_follows() -> None:
    model = Attention().eval()
    found = find_groups(model, torch.randn(2, 5, 12))
    apply_plan(model, found.plan(found.units[:1]))
    assert (model.num_heads, model.qkv.out_features, model.proj.in_features) == (3, 27, 9)


def test_two_plans_are_one() -> None:
    torch.manual_seed(1)
    model = Chain().eval()
    batch = images()
    original = Chain().eval()
    original.load_state_dict(model.state_dict())
    for _ in range(2):
        found = find_groups(model, batch)
        apply_plan(model, found.plan(group.units[1] for group in found.groups))
    plan = plan_of(model)
    assert plan is not None
    apply_plan(original, plan)
    assert torch.equal(original(batch), model(batch))


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"another model: there is no x\.weight"):
        apply_plan(Chain(), ChannelPlan({"x.weight": {0: (0,)}}))
    with pytest.raises(CheckpointError, match=r"another model: a\.weight has the shape"):
        apply_plan(Chain(), ChannelPlan({"a.weight": {0: (0, 99)}}))
