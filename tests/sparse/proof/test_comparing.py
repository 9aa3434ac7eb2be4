"""The steps of two runs are set side by side whatever operators a linear layer takes."""

from __future__ import annotations

from sparsebit.sparse.channels.trace import TracedCall
from sparsebit.sparse.proof.comparing import computing


def steps(*names: str) -> list[TracedCall]:
    return [TracedCall(name, "layer", ((2, 3),)) for name in names]


def test_a_product_and_its_bias_are_one_step() -> None:
    whole = computing(steps("view", "addmm", "view", "relu"))
    parts = computing(steps("bmm", "view", "add", "relu"))
    assert [entry.name for entry in whole] == [entry.name for entry in parts] == ["addmm", "relu"]
    assert [entry.step for entry in parts] == [2, 3]
    assert [entry.number for entry in parts] == [1, 2]


def test_a_second_addition_stays_a_step() -> None:
    assert [entry.name for entry in computing(steps("mm", "add", "add"))] == ["addmm", "add"]
