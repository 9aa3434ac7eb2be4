from __future__ import annotations

import pytest

from sparsebit.graph.nodes.aliasing import may_be_view, may_hold_view
from tests.parameters import listed


@pytest.mark.parametrize(
    "name",
    listed("""
        view | view_as_real | view_as_complex | dsplit | diagonal | unfold | dropout | to | getitem | conj |
        sum_to_size
    """),
)
def test_views(name: str) -> None:
    assert may_be_view(name)


@pytest.mark.parametrize("name", ["add", "add_", "clone", "relu", "linear", "cat", "matmul", "softmax", "mean"])
def test_other_ops(name: str) -> None:
    assert not may_be_view(name)


@pytest.mark.parametrize(
    ("name", "holds"), [("T", True), ("data", True), ("mask", True), ("shape", False), ("dtype", False)]
)
def test_attributes(name: str, holds: bool) -> None:
    assert may_hold_view(name) is holds
