"""What is learned of a chain of three units, and the cheapest placement by that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparsebit.deploy.audit.region_times import RegionTime, RegionTimes
from sparsebit.quantization.placement_search.learned_costs import LearnedCosts
from sparsebit.quantization.placement_search.traced_graph import FusedUnit, Link

SIZE = 1000


def chain(*links: tuple[int, int], can_be_integer: tuple[bool, ...] = (True, True, True)) -> Any:
    """Units `a`, `b`, `c`; the world outside feeds `a` and reads `c`."""
    units = tuple(
        FusedUnit((name,), "convolution", name, (f"{name}.weight",), can)
        for name, can in zip("abc", can_be_integer, strict=True)
    )
    pairs = links or ((-1, 0), (0, 1), (1, 2), (2, -1))
    return SimpleNamespace(units=units, links=tuple(Link(*pair, ("site",), SIZE) for pair in pairs))


def times(layers: dict[str, float], conversions: dict[str, float] | None = None) -> RegionTimes:
    regions = [RegionTime("kernel", ms, "float", (name,)) for name, ms in layers.items()]
    regions += [RegionTime("convert", ms, "float", (), behind) for behind, ms in (conversions or {}).items()]
    return RegionTimes("onnxruntime", "1", "cpu", 1, 1, sum(r.ms for r in regions), 0.0, tuple(regions))


FLOAT = frozenset({0, 1, 2})


def test_a_unit_that_is_slow_in_integers_becomes_float_where_conversions_are_cheap() -> None:
    costs = LearnedCosts(chain())
    costs.learn(FLOAT, times({"a": 1.0, "b": 1.0, "c": 1.0}), 1.0)
    costs.learn(frozenset(), times({"a": 0.2, "b": 3.0, "c": 0.2}, {"": 0.01, "c": 0.01}), 1.0)
    assert costs.cheapest() == {1}


def test_conversions_that_turn_out_dear_are_avoided() -> None:
    costs = LearnedCosts(chain())
    costs.learn(FLOAT, times({"a": 1.0, "b": 1.0, "c": 1.0}), 1.0)
    costs.learn(frozenset(), times({"a": 0.2, "b": 1.5, "c": 0.2}, {"": 0.01, "c": 0.01}), 1.0)
    assert costs.cheapest() == {1}
    costs.learn(frozenset({1}), times({"a": 0.2, "b": 1.0, "c": 0.2}, {"": 0.01, "a": 0.5, "b": 0.5, "c": 0.01}), 1.0)
    assert costs.of(frozenset({1})) == pytest.approx(2.42)
    assert costs.cheapest() == frozenset()


def test_layout_changes_between_float_units_belong_to_them() -> None:
    costs = LearnedCosts(chain())
    costs.learn(FLOAT, times({"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 0.25}), 2.0)
    assert costs.of(FLOAT) == pytest.approx(6.5)
    assert costs.of_unit(0, is_float=True) == pytest.approx(2.5)


def test_a_result_is_converted_once_for_all_that_read_it() -> None:
    graph = chain((-1, 0), (0, 1), (0, 2), (1, -1), (2, -1), can_be_integer=(False, True, True))
    costs = LearnedCosts(graph)
    costs.learn(FLOAT, times({"a": 1.0, "b": 1.0, "c": 1.0}), 1.0)
    costs.learn(frozenset({0}), times({"a": 1.0, "b": 0.2, "c": 0.2}, {"a": 1.0, "b": 0.1, "c": 0.1}), 1.0)
    assert costs.of(frozenset({0})) == pytest.approx(2.6)
    assert costs.cheapest() == {0}  # counted once for each reader, 1.0 would be more than either gains


def test_what_cannot_be_an_integer_stays_float() -> None:
    costs = LearnedCosts(chain(can_be_integer=(True, False, True)))
    costs.learn(FLOAT, times({"a": 1.0, "b": 1.0, "c": 1.0}), 1.0)
    costs.learn(frozenset({1}), times({"a": 0.1, "b": 1.0, "c": 0.1}, {"a": 0.1, "b": 0.1}), 1.0)
    assert costs.cheapest() == {1}
