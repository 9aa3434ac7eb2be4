"""A config alone gives each group the ratio that was chosen, though layers lie in several groups."""

from __future__ import annotations

import pytest

from sparsebit.errors import ConfigError
from sparsebit.sparse import parse_sconfig
from sparsebit.sparse.budgets.group_ratios import config_of_ratios


def test_the_order_of_entries_tells_groups_apart() -> None:
    layers = {"b": ("b", "c"), "a": ("a", "b"), "c": ("c", "d")}
    ratios = {"a": 0.25, "b": 0.5, "c": 0.0}
    config = config_of_ratios(parse_sconfig({"SPARSER": {"RATIO": 0.7}}), layers, ratios)
    assert {name: config.ratio_of(layers[name]) for name in layers} == ratios
    again = parse_sconfig(config.to_dict())
    assert {name: again.ratio_of(layers[name]) for name in layers} == ratios


def test_equal_ratios_need_no_layer_of_their_own() -> None:
    layers = {"a": ("a", "b"), "b": ("a", "b")}
    config = config_of_ratios(parse_sconfig({}), layers, {"a": 0.25, "b": 0.25})
    assert config.ratio_of(("a", "b")) == 0.25


def test_groups_that_names_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match="no order of SPECIFIC"):
        config_of_ratios(parse_sconfig({}), {"a": ("a", "b"), "b": ("a", "b")}, {"a": 0.25, "b": 0.5})
